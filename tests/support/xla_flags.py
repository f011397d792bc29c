"""Flags that make XLA compile faster on CPUs.

Machine code without optimization: the same programs and collectives, compiled in a sixth of the time and somewhat
slower to run. Tests run a program a few times.
"""

QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
