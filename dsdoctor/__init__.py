"""dsdoctor: the troubleshooting assistant for DeepSpeed training."""

__version__ = "0.1.0"
