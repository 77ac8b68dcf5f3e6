"""What is printed about processes and ranks: how they end, who waits for whom, networks, devices, partitioned weights.

Rows as in `dsdoctor.logs.grammar`. Forms are those of torch 1.8 to 2.13, NCCL 2.8 to 2.27, the `deepspeed` command,
torchrun, srun, mpirun, pdsh, and the shell. The backends of other accelerators print NCCL's lines under their own
names: HCCL, XCCL and so on.
"""

from __future__ import annotations

import signal

from dsdoctor.logs.rows import row as _row

WORDS = {
    "Killed": -signal.SIGKILL,
    "Segmentation fault": -signal.SIGSEGV,
    "Bus error": -signal.SIGBUS,
    "Aborted": -signal.SIGABRT,
    "Illegal instruction": -signal.SIGILL,
    "Floating point exception": -signal.SIGFPE,
    **{name: -one for one in signal.Signals for name in (one.name, one.name.removeprefix("SIG"))},
    **{str(128 + number): -number for number in (4, 6, 7, 8, 9, 11, 15)},
    **{str(256 - number): -number for number in (4, 6, 7, 8, 9, 11, 15)},
}
"""Exit codes by what shells, launchers and Python call the signal."""

ENDS = (
    "cancelled",
    "sighup",
    "oom-kill",
    "ssh-failed",
    "closing-signal",
    "peer-lost",
    "local-rank-refused",
    "native-error",
    "abort-reason",
    "client-timeout",
    "port-taken",
    "watchdog",
    "watchdog-status",
)
"""Kinds of events that tell of the end of a process: what goes on for long after one of them is another attempt."""

EXITS = (
    _row("exit", "exits with return code", r"exits with return code = (?P<code>-?\d+)"),
    _row("exit", "(exitcode: ", r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)"),
    _row(
        "exit",
        "returned non-zero exit status ",
        r"Error: Command '\[?'?(?:\S*/)?(?:deepspeed|torchrun|accelerate|mpirun|srun)\b.*"
        r"returned non-zero exit status (?P<code>\d+)\b",
    ),
    _row("exit", "terminated with exit code", r"Exception: process \d+ terminated with exit code (?P<code>\d+)"),
    _row("exit-rank", "(local_rank: ", r"^\s*rank\s+: (?P<rank>\d+) \(local_rank: \d+\)"),
    _row("exit-code", "exitcode  : ", r"^\s*exitcode\s+: (?P<code>-?\d+) \(pid: \d+\)"),
    _row(
        "exit-word",
        (
            "Killed",
            "Segmentation fault",
            "Bus error",
            "Aborted",
            "(core dumped)",
            "Illegal instruction",
            "Floating point exception",
        ),
        r"(?:line \d+: +\d+ |tasks? (?P<rank>\d+)[\d,-]*: |Fatal Python error: |Caught signal \d+ \(|Signal: |^)"
        r"(?P<word>Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Floating point exception)\b"
        r"(?! process)",
    ),
    _row(
        "exit-word",
        "exited on signal ",
        r"noticed that process rank (?P<rank>\d+) .*exited on signal \d+ \((?P<word>Killed|Segmentation fault|Bus error"
        r"|Aborted|Illegal instruction|Floating point exception)\)",
    ),
    _row(
        "exit-word",
        "returned non-zero exit status ",
        r"returned non-zero exit status (?P<word>13[245679]|143|24[1579]|248|25[02])\b",
    ),
    _row(
        "exit-word",
        ("died with <Signals.", "terminated with signal SIG"),
        r"(?:died with <Signals\.|process \d+ terminated with signal )"
        r"(?P<word>SIG(?:KILL|SEGV|BUS|ABRT|ILL|FPE|TERM|HUP|XCPU))\b",
    ),
    _row(
        "exit",
        "Exited with exit code",
        r"srun: error: \S+: tasks? (?P<rank>\d+)[\d,-]*: Exited with exit code (?P<code>\d+)",
    ),
    # systemd and docker compose.
    _row("exit", "Main process exited", r"Main process exited, code=exited, status=(?P<code>[1-9]\d*)/"),
    _row(
        "exit-word",
        "Main process exited",
        r"Main process exited, code=(?:killed|dumped), status=\d+/(?P<word>KILL|SEGV|BUS|ABRT|ILL|FPE|TERM|HUP)\b",
    ),
    _row("exit", "exited with code ", r"^[\w.-]+[-_]\d+ exited with code (?P<code>[1-9]\d*)$"),
    # mpirun and Kubernetes, as they indent it; a code of 0 is no failure.
    _row("exit", ("Exit Code:", "Exit code:"), r"^\s{2,}Exit [Cc]ode:\s{3,}(?P<code>[1-9]\d*)\s*$"),
)

RANKS = (
    # A launcher starts the ranks: the `deepspeed` command, torchrun (also where it starts them again).
    _row(
        "started",
        ("WORLD INFO DICT", "OMP_NUM_THREADS", "for entrypoint", "will restart worker group"),
        r"launch\.py:\d+:main\] WORLD INFO DICT|Setting OMP_NUM_THREADS environment variable for each process"
        r"|starting workers for entrypoint|will restart worker group",
    ),
    _row("nccl-p2p", "via P2P/", r"NCCL INFO Channel .* via P2P/"),
    _row(
        "nccl-version",
        "NCCL INFO NCCL version",
        r"(?P<process>(?:[\w.-]+:)?\d+):\d+ \[\d+\] NCCL INFO NCCL version (?P<nccl>\d+\.\d+\.\d+)",
    ),
    _row("node-rank", "node_rank=", r"nnodes=(?P<nodes>\d+), num_local_procs=\d+, node_rank=(?P<node>\d+)"),
    _row("nccl-truncated", "Message truncated", r"NCCL WARN Message truncated : received \d+ bytes instead of \d+"),
    _row(
        "name-unresolved",
        "cannot be retrieved",
        r"network addresses of \((?P<name>[^,()]+), \d+\) cannot be retrieved",
    ),
    _row("closing-signal", "closing signal SIG", r"Sending process \d+ closing signal SIG(?:TERM|KILL|INT)"),
    _row(
        "sighup",
        ("death signal", "SIGHUP", "got signal: 1", "Hangup"),
        r"Received (?:1|Signals\.SIGHUP) death signal|closing signal SIGHUP|got signal: 1\b"
        r"|line \d+: +\d+ Hangup\b",
    ),
    _row(
        "cancelled",
        (
            "CANCELLED AT",
            "DUE TO TIME LIMIT",
            "DUE TO PREEMPTION",
            "death signal",
            "got signal: ",
            "Main process received SIG",
            "job killed",
            "Terminated",
        ),
        r"CANCELLED AT \S+|DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE)"
        r"|Received (?:2|15|Signals\.SIG(?:INT|TERM)) death signal"
        r"|SignalException: Process \d+ got signal: (?:2|15)\b"
        r"|Main process received SIG(?:INT|TERM)|PBS: job killed: walltime|TERM_RUNLIMIT: job killed"
        r"|line \d+: +\d+ Terminated\b",
    ),
    _row(
        "local-rank-refused",
        ("unrecognized arguments", "o such option", "Unknown command line flag"),
        r"(?:error: unrecognized arguments:.*--|[Nn]o such option:? '?--|Unknown command line flag '-{0,2})"
        r"local[-_]rank",
    ),
    _row(
        "ssh-failed",
        (
            "ssh:",
            "ssh exited",
            "Permission denied (publickey",
            "Host key verification failed",
            "not enough slots available",
            "unable to reliably start one or more daemons",
        ),
        r"ssh: (?:connect to host|Could not resolve)|ssh exited with exit code (?:126|127|255)"
        r"|Permission denied \(publickey|Host key verification failed|not enough slots available in the system"
        r"|unable to reliably start one or more daemons",
    ),
    _row(
        "gpu-fault",
        ("NVRM: Xid", "ECC", "fallen off the bus", "GPU is lost"),
        r"NVRM: Xid [^,]*: (?:48|63|64|74|79|92|94|95|119|120)\b"
        r"|(?i:(?:uncorrectable|double[- ]bit) ECC)(?!(?: errors?)?\s*:\s*0\b)|fallen off the bus|GPU is lost",
    ),
    _row(
        "device-assert",
        ("Assertion `", "device-side assert"),
        r"\.cuh?:\d+:.*Assertion `[^`]+` failed|device-side assert triggered",
    ),
    _row(
        "watchdog",
        ("Watchdog caught collective operation timeout", "timed out in blocking wait"),
        r"\[Rank (?P<rank>\d+)\] (?:Watchdog caught collective operation timeout: |Work )Work[A-Z]*CCL\("
        r"SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?.*?Timeout\(ms\)=(?P<timeout>\d+)\)",
    ),
    # What follows the watchdog's first line, and what its own watchdog says of it.
    _row(
        "watchdog-status",
        ("detected by watchdog at work", "Timeout at ", "watchdog got stuck for"),
        r"Rank (?P<rank>\d+)\] .*?(?:(?:detected by watchdog at work(?: sequence id)?|Timeout at [A-Z]*CCL work): "
        r"(?P<work>\d+)"
        r"|watchdog got stuck for (?P<stuck>\d+) seconds)",
    ),
    # How far a rank had come: what it had called, and what was done.
    _row(
        "work-count",
        "ast enqueued ",
        r"(?:\[(?P<group>PG [^\]]*?) )?Rank (?P<rank>\d+)\] .*?[Ll]ast enqueued (?:[A-Z]*CCL )?work: "
        r"(?P<enqueued>\d+), last completed (?:[A-Z]*CCL )?work: (?P<completed>\d+)",
    ),
    # An exception of C++ that nothing caught; that of a timeout has its own row.
    _row(
        "native-error",
        ("watchdog thread terminated with exception: ", "what():  "),
        r"(?:(?:Rank (?P<rank>\d+)\] (?:[A-Z]*CCL|Process group) )?watchdog thread terminated with exception: "
        r"|what\(\): +)(?:.*terminated with exception: )?(?P<error>(?!.*Watchdog caught)\S.*)",
    ),
    # The C library or C++ about why it aborts; it prints these alone, or behind a bar.
    _row(
        "abort-reason",
        (
            "double free or corruption",
            "free(): ",
            "malloc(): ",
            "realloc(): ",
            "malloc_consolidate(): ",
            "munmap_chunk(): ",
            "corrupted size vs. prev_size",
            "corrupted double-linked list",
            "stack smashing detected",
            "terminate called ",
            "pure virtual method called",
            "Assertion `",
        ),
        r"(?:^|\s{3,}|^\*\*\* Error in `[^']+': )(?:\*\*\* )?(?:double free or corruption \("
        r"|(?:free|realloc)\(\): invalid "
        r"|malloc(?:_consolidate)?\(\): |munmap_chunk\(\): |corrupted (?:size vs\. prev_size|double-linked list)"
        r"|stack smashing detected|terminate called (?:without|after|recursively)|pure virtual method called)"
        r"|^\S+: \S+:\d+: .*: Assertion `.+' failed\.$",
    ),
    _row(
        "ib-completion",
        "Got completion ",
        r"NET/IB\w* ?: ?Got completion (?:from peer \S+ )?with (?:status=(?:IBV_\w+\()?|error )(?P<status>\d+)",
    ),
    _row("ib-verbs", "NCCL WARN Call to ibv_", r"NCCL WARN Call to (?P<call>ibv_\w+) failed"),
    _row(
        "nccl-shm",
        ("posix_fallocate failed", "shared memory segment", "/dev/shm/nccl"),
        r"NCCL WARN .*(?:posix_fallocate failed|shared memory segment|/dev/shm/nccl\S* failed|No space left)",
    ),
    _row("no-interface", "no socket interface found", r"NCCL WARN .*no socket interface found"),
    _row(
        "no-peer-access",
        ("peer access is not supported", "CUDA IPC handle"),
        r"NCCL WARN .*(?:peer access is not|open CUDA IPC)",
    ),
    _row(
        "client-timeout",
        "client socket has timed out",
        r"The client socket has timed out after \d+ ?\w+ while trying to connect to \("
        r"(?P<name>[^,()]+), (?P<port>\d+)\)",
    ),
    _row(
        "port-taken",
        ("errno: 98", "server socket has failed to"),
        r"server socket has failed to (?:bind to \S+ \(errno: 98|(?P<refused>bind\b.*?(?:errno: 13|EACCES))"
        r"|listen on any local)",
    ),
    # Rank 0 at work on the data before training.
    _row(
        "preparing",
        ("examples/s", "ba/s", "okeniz"),
        r"(?i)\b(?:map|filter|tokeniz\w*|running tokenizer|grouping texts|generating \w+ split|saving the dataset"
        r"|packing)\b[^|%]{0,60}: +\d+%\|",
    ),
    _row("nccl-interface", "NET/Socket : Using", r"NET/Socket : Using (?P<interfaces>\[\d+\].*)"),
    _row(
        "connect-failed",
        (
            "Connection refused",
            "Connection timed out",
            "No route to host",
            "Software caused connection abort",
            "Network is unreachable",
        ),
        r"NCCL WARN .*[Cc]onnect to (?P<address>[\w.:%-]+)"
        r".*(?:refused|timed out|No route|connection abort|unreachable)",
    ),
    _row(
        "rank-batches",
        ("batches", " steps", " iterations", "loader)", "loader length", "steps_per_epoch"),
        r"[Rr]ank[ =:]*(?P<rank>\d+)\b.{0,60}?(?:\b(?P<batches>\d+) (?:batches|steps|iterations)\b"
        r"|\b(?:(?:num_|n_)?batches|(?:train_?)?(?:data_?)?loader length|steps_per_epoch) ?[=:]? ?(?P<count>\d+)\b)"
        r"|len\((?:train_?)?(?:data_?)?loader\) ?[=:] ?(?P<length>\d+)",
    ),
    _row(
        "peer-lost",
        ("closed by remote peer", "closed by peer", "remote process exited", "Connection reset by peer"),
        r"[Cc]onnection (?:closed|reset) by (?:remote )?peer|remote process exited",
    ),
    _row("generate-frame", "generation/utils.py", r"^\s*\w+ \(\S*generation/utils\.py:\d+"),
    _row("trace-invalidated", "Invalidate trace cache", r"Invalidate trace cache @ step (?P<trace_step>\d+)"),
    _row(
        "experts",
        ("num_local_experts", "num_experts", "n_routed_experts"),
        r'"(?:num_local_|num_|n_routed_)experts": [1-9]',
    ),
    _row("leaf-modules", "leaf_module", r"set_z3_leaf_modules|\"leaf_module\"|Setting .* as leaf module"),
    _row(
        "empty-in-model",
        "and torch.Size([0]) in the model",
        r"found shape torch\.Size\(\[(?!0\])[\d, ]+\]\) in the checkpoint and torch\.Size\(\[0\]\) in the model",
    ),
    _row(
        "empty-in-file",
        "torch.Size([0]) in the checkpoint",
        r"found shape torch\.Size\(\[0\]\) in the checkpoint and torch\.Size\(\[(?!0\])[\d, ]+\]\) in the model",
    ),
)
