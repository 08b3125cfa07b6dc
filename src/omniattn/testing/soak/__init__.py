"""Random problems of every operation beside float64: ``omniattn verify --soak``.

``draw``, ``problem``
    Facts of a problem from its seed and number, as data; its numbers.
``operations``
    The operations, and how often each is drawn: ``attention``, ``low``, ``gradients``, ``caches`` (with
    ``cache_runs``), ``quantizers``, ``merging``. Each draws facts and checks a problem.
``formulas``, ``gradient_formulas``, ``formats``, ``cache_formats``
    What must come out: definitions in float64, where the arrays lie, and the documented bytes of quantized operands and
    caches. They use nothing of `omniattn.reference`.
``limits``, ``judge``
    How far an element may be from it, and the comparison.
``machines``, ``torch_machine``, ``chosen``, ``views``
    NumPy, torch, CuPy and JAX behind the few functions that this needs; arrays with guards and NaN around them.
``outcome``, ``program``
    Passed, refused or failed; a failure as a program.
``watch``, ``worker``, ``tally``
    Problems in a process that may hang or die, and the counts.
"""
