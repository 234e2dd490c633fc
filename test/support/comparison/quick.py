"""The quick run, for CI: programs that have a fault of a kind that was met, or would show it
first.
"""

CORPUS = """get_rank pg_rank_arg all_reduce_intermediate all_gather_list reduce broadcast
all_reduce_group_arg autograd_function_pg_global rc_pg_changes_ranks""".split()
LOWERING = """reduce_after_another all_reduce_intermediate all_gather_into_tensor_stacked""".split()
OPERATORS = """cond.simple-aot_eager-backward scan.simple-aot_eager-backward map.nested-aot_eager-backward
invoke_subgraph.simple-aot_eager-backward while_loop.simple-aot_eager-forward
auto_functionalize.simple-lowered-forward cond.simple-lowered-backward""".split()
FEATURES = """cond_training-aot_eager scanned_training-aot_eager regions-aot_eager flex_trained-aot_eager
compiled_autograd-aot_eager checkpointed-aot_eager export_strict-eager export_not_strict-eager
export_strict_with_hooks-eager operator-aot_eager operator_that_writes-aot_eager two_tensors-aot_eager
dispatch_mode_in_eager-eager ensemble-aot_eager forward_derivative-aot_eager autocast-aot_eager
copies_and_files-eager graphs_of_a_loop_with_breaks-aot_eager""".split()
DTENSORS = """detached_copy_P-aot_eager cross_entropy_ignored_S0-eager cross_entropy_weighted_S0-eager nll_S0-eager
gather_labels_S1-eager one_hot_S0-eager one_hot_S0-aot_eager interpolate_S0-eager
norm_in_place_S0-aot_eager fill_P-eager masked_mean_S0-eager
dropout_of_a_sum-eager noise_of_replicas-eager
hook_that_reduces-one_graph reduce_after_another-lowered
trained_by_adamw-eager trained_by_adafactor-eager tensor_parallel-aot_eager""".split()
MODELS = """llama-training qwen3-training mixtral-generating""".split()
RANKS = ["all_reduce_of_shards"]
