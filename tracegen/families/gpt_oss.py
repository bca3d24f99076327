"""gpt-oss: the k best logits of a gate with a bias, softmax over these alone; experts have biases too."""

from moereplay.tracegen.families import rules
from moereplay.tracegen.families.contract import Family, small

SIZES = {"intermediate_size": 16, "head_dim": 16, "sliding_window": 8}
ROTARY = {"rope_theta": 10000.0, "rope_type": "default"}
#: 3 layers of 16 experts, top 4.
TINY = small(**SIZES, num_local_experts=16, num_experts_per_tok=4, rope_parameters=ROTARY)

FAMILY = Family("gpt_oss", ("gpt_oss",), rules.softmax_of_the_chosen, TINY, source="arXiv 2508.10925")
