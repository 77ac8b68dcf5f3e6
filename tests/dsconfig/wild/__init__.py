"""ds_configs in the shapes that people publish: examples of frameworks, fine-tuning scripts, papers, course work.

Collected from public repositories and rewritten: values that name somebody's paths or projects are replaced, and what
differed in nothing that matters was merged. `wrong` are the ids that have to be found at severity error or warning,
because DeepSpeed itself refuses the config, or does something else than it says; everything else has to stay silent.
"""

from tests.dsconfig.wild import hugging_face, plain, troubled

CONFIGS = (*hugging_face.CONFIGS, *plain.CONFIGS, *troubled.CONFIGS)
