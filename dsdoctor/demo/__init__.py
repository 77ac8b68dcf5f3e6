"""The demo that `dsdoctor demo` triages: an ordinary DeepSpeed script, run as any user's script is."""
