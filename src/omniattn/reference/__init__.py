"""NumPy semantics of every operation: the oracle of the tests and the backend for arrays on the CPU."""

from omniattn.reference.attention import attention
from omniattn.reference.backward import attention_backward, attention_varlen_backward
from omniattn.reference.merge import merge_states
from omniattn.reference.varlen import attention_varlen

__all__ = ["attention", "attention_backward", "attention_varlen", "attention_varlen_backward", "merge_states"]
