"""Every benchmark of the product, its figures and their targets."""

from benchmarks.suite.figures import Benchmark, Comparison, Figure, KnownMiss

FUSED = Comparison("openpipe-art 0.5.18", "ratio_art_fused", in_quick=False)
BOUND = Comparison("lower bound")
IDEAL = Comparison("no overhead")
TRL = "trl 1.16.0"
PER_PARAMETER = "a call a parameter"
LARGE_TENSOR = Comparison("one large tensor")
STUBS, LOOP = Comparison("the stubs' CPU"), Comparison("a loop of Python's, CPU")
TRL_5M, TRL_5M_MB = (
    Comparison(TRL, f"sizes/5M/trl/{key}", in_quick=False) for key in ("tokens_per_cpu_s", "peak_mb")
)

ROLLOUTS = (
    Benchmark(
        "overlap",
        full=("--seeds", "5"),
        quick=("--seeds", "1", "--no-peers"),
        figures=(
            Figure(
                "ratio_trajectory",
                "x",
                1.13,
                peer=Comparison("openpipe-art 0.4.11", "ratio_art_two_gathers", in_quick=False),
                limit=BOUND,
            ),
            Figure("ratio_group", "x", 1.29, peer=FUSED, limit=BOUND),
            Figure("rollouts_busy_trajectory", "x", is_steady=False),
            Figure("scores_busy_trajectory", "x", is_steady=False),
            Figure("first_score_trajectory", "medians", is_steady=False),
            Figure("rollouts_busy_group", "x", is_steady=False),
            Figure("scores_busy_group", "x", is_steady=False),
            Figure("first_score_group", "medians", is_steady=False),
            Figure("overhead_trajectory", "x", 1.03, limit=IDEAL),
            Figure("overhead_group", "x", 1.03, limit=IDEAL),
            Figure("ratio_art_fused", "x", limit=BOUND, is_steady=False, in_quick=False),
            Figure("ratio_art_two_gathers", "x", limit=BOUND, is_steady=False, in_quick=False),
        ),
    ),
    Benchmark(
        "fanout",
        quick=("--few",),
        figures=(
            Figure("recorded_share", "x", 1.0, more_is_better=True, is_exact=True),
            Figure("expected", "task runs"),
            Figure(
                "flow_cpu_ms_per_task",
                "ms",
                4.0,
                known_miss=KnownMiss(8.0, "95 % of it is Prefect's engine and its events, by a profile"),
            ),
            Figure("server_cpu_ms_per_task", "ms"),
            Figure("lag_p50_ms", "ms"),
            Figure("lag_p99_ms", "ms", 60.0),
            Figure("lag_max_ms", "ms"),
        ),
    ),
    Benchmark(
        "order",
        figures=(
            Figure(
                "ratio_8",
                "x",
                1.05,
                peer=Comparison("first come, first served", "ratio_8_first_come"),
                limit=BOUND,
                is_steady=False,
            ),
            Figure(
                "ratio_32",
                "x",
                1.15,
                peer=Comparison("first come, first served", "ratio_32_first_come"),
                limit=BOUND,
                is_steady=False,
            ),
        ),
    ),
    Benchmark(
        "exposed_reward",
        quick=(),
        figures=(
            Figure(
                "exposed_s", "s", 0.05, peer=Comparison("in a thread", "exposed_thread_s"), is_steady=False
            ),
            Figure("exposed_as_they_come_s", "s"),
        ),
    ),
    Benchmark(
        "executor",
        quick=("--groups", "64"),
        figures=(
            Figure(
                "flow_cpu_share_4",
                "x",
                0.2,
                known_miss=KnownMiss(
                    0.3, "a third of it is what Ray takes to send the two calls of a group, by a profile"
                ),
                is_steady=False,
            ),
            Figure("lost", "trajectories", 0.0, is_exact=True),
            Figure("doubled", "trajectories", 0.0, is_exact=True),
        ),
    ),
    Benchmark(
        "staleness",
        figures=(
            Figure("one_behind_train_1s", "s"),
            Figure("one_behind_train_3s", "s"),
            Figure("on_policy_train_1s", "s"),
        ),
    ),
    Benchmark(
        "recording",
        figures=(
            Figure(
                "recorded_share",
                "x",
                1.0,
                more_is_better=True,
                peer=Comparison("Prefect's default", "recorded_share_default"),
                is_exact=True,
            ),
        ),
    ),
    Benchmark(
        "frames",
        quick=(),
        figures=tuple(
            Figure(f"{path}_{what}", what, most, is_exact=True)
            for path in ("completion", "score")
            for what, most in (("frames", 15), ("files", 8))
        ),
    ),
)

STORING = (
    Benchmark(
        "handoff",
        figures=(
            Figure(
                "cpu_s",
                "s",
                0.6,
                peer=Comparison("msgpack", "ways/msgpack/cpu_s"),
                known_miss=KnownMiss(
                    4.0,
                    "receiving the answers and dropping them takes 0.85 s, and a plain write of as many bytes 0.27 s; the rest is not explained",
                ),
            ),
            Figure("decode_cpu_s", "s"),
            Figure("wall_s", "s", peer=Comparison("msgpack", "ways/msgpack/wall_s")),
            Figure(
                "lag_excess_ms",
                "ms",
                10.0,
                peer=Comparison("msgpack", "ways/msgpack/lag_excess_ms"),
                is_steady=False,
                known_miss=KnownMiss(
                    150.0,
                    "the loop's thread runs 2 ms of it, and waits for a processor or the interpreter's lock",
                ),
            ),
            Figure("peak_rss_gb", "GB", 1.5, peer=Comparison("msgpack", "ways/msgpack/peak_rss_gb")),
            Figure(
                "read_column_s",
                "s",
                0.01,
                peer=Comparison("msgpack", "ways/msgpack/read_column_s"),
                known_miss=KnownMiss(
                    0.1, "some 40 shards are opened and compared with their hashes, 0.5 ms each"
                ),
            ),
        ),
    ),
    Benchmark(
        "persist",
        quick=(),
        figures=(
            Figure("cpu_ms", "ms", peer=Comparison("orjson", "ways/orjson/cpu_ms")),
            Figure("cpu_to_limit", "x", 4.0, limit=Comparison("writing as many bytes"), is_steady=False),
            Figure("rows_cpu_ms", "ms"),
            Figure(
                "lag_excess_ms",
                "ms",
                5.0,
                peer=Comparison("orjson", "ways/orjson/lag_excess_ms"),
                is_steady=False,
            ),
        ),
    ),
    Benchmark(
        "scan",
        figures=(
            Figure(
                "inspect_s",
                "s",
                2.0,
                known_miss=KnownMiss(
                    3.0, "3,010 shards are opened and compared with their hashes, 0.5 ms each"
                ),
            ),
            Figure("column_s", "s", 2.0),
            Figure("slowest_query_s", "s", 1.0),
            Figure("inspect_s3_s", "s"),
            Figure("column_s3_s", "s"),
        ),
    ),
    Benchmark(
        "compaction",
        quick=(),
        figures=(
            Figure("compaction_s", "s"),
            Figure(
                "commit_beside_ms", "ms", limit=Comparison("nothing compacted", "commit_ms"), is_steady=False
            ),
        ),
    ),
    Benchmark(
        "endurance",
        full=("--picture", "docs/images/endurance.png"),
        figures=(
            Figure(
                "rss_growth",
                "x",
                0.02,
                limit=Comparison("step 50"),
                is_steady=False,
                known_miss=KnownMiss(
                    0.08, "memory rises once, at a peak whose memory the allocator keeps, and falls later"
                ),
            ),
        ),
    ),
    Benchmark(
        "viewer",
        figures=(
            Figure("first_page_s", "s", 2.0),
            Figure("first_page_again_s", "s", 1.0),
            Figure("slowest_first_s", "s"),
            Figure("slowest_again_s", "s", 1.0),
        ),
    ),
)

TRAINING = (
    Benchmark(
        "train_step",
        quick=("--sizes", "5M", "--no-peers"),
        figures=(
            Figure("ratio_to_bare", "x", 0.9, more_is_better=True, limit=Comparison("a bare loop")),
            Figure("ratio_to_trl", "x", 2.8, more_is_better=True, peer=Comparison(TRL), in_quick=False),
            Figure("sizes/5M/varlen/tokens_per_cpu_s", "tokens", peer=TRL_5M, is_steady=False),
            Figure("sizes/5M/varlen/peak_mb", "MB", peer=TRL_5M_MB, is_steady=False),
            Figure("sizes/5M/padded/peak_mb", "MB"),
            *(
                Figure(f"sizes/5M/{layout}/gradient_difference", "x", 1e-5, is_exact=True)
                for layout in ("varlen", "padded")
            ),
            Figure("sizes/58M/varlen/tokens_per_cpu_s", "tokens", in_quick=False),
            Figure("sizes/58M/varlen/peak_mb", "MB", in_quick=False),
        ),
    ),
    Benchmark(
        "normalization",
        figures=(
            Figure("max_relative_difference", "x", 1e-5, is_exact=True),
            Figure("split_difference", "x", 1e-6, is_exact=True),
        ),
    ),
    Benchmark(
        "packing",
        quick=(),
        figures=(Figure("padding_share", "x", 0.02), Figure("seconds", "s", 0.2)),
    ),
    Benchmark(
        "head_memory",
        figures=(
            Figure(
                "chunks/512 MiB/head_mb",
                "MB",
                peer=Comparison("nothing cut", "chunks/whole/head_mb"),
            ),
        ),
    ),
    Benchmark(
        "load_memory",
        figures=(
            Figure("of_bound", "x", 1.0),
            Figure("2 ranks/load_mb", "MB"),
            Figure("4 ranks/load_mb", "MB"),
        ),
    ),
    Benchmark("algorithms", figures=(Figure("lowest_gain", "reward", 0.1, more_is_better=True),)),
)

SYNC = (
    Benchmark(
        "sync",
        quick=("--passes", "2"),
        figures=(
            Figure("speedup", "x", 4.0, more_is_better=True, peer=Comparison(PER_PARAMETER)),
            Figure("speedup_zero3", "x", 6.0, more_is_better=True, peer=Comparison(PER_PARAMETER)),
            Figure(
                "share_of_loopback",
                "x",
                0.8,
                more_is_better=True,
                limit=LARGE_TENSOR,
                known_miss=KnownMiss(
                    0.7,
                    "noise: 0.73 to 0.86 in four runs, since the large tensor's least time varies from 0.13 to 0.16 s",
                ),
            ),
            Figure("control_calls", "calls", 5.0, is_exact=True),
            Figure("seconds_ours", "s", limit=Comparison("memcpy", "seconds_memcpy"), is_steady=False),
            Figure("seconds_per_parameter", "s"),
            Figure("seconds_ours_zero3", "s"),
            Figure("seconds_per_parameter_zero3", "s"),
        ),
    ),
    Benchmark(
        "stall",
        figures=(
            Figure("gap_none_s", "s"),
            Figure("gap_keep_s", "s", peer=Comparison(PER_PARAMETER, "gap_per_parameter_s"), is_steady=False),
            Figure(
                "gap_second_copy_s",
                "s",
                0.1,
                peer=Comparison(PER_PARAMETER, "gap_per_parameter_s"),
                limit=Comparison("no sync", "gap_none_s"),
                is_steady=False,
                known_miss=KnownMiss(
                    0.25, "the copy is compared between two steps of the live model: 0.098 s without that"
                ),
            ),
            Figure("gap_second_copy_least_s", "s"),
            Figure("gap_per_parameter_s", "s"),
            Figure("first_new_token_s", "s"),
        ),
    ),
    Benchmark(
        "servers",
        figures=(
            Figure("ratio_4_to_1", "x", 1.15, limit=Comparison("one receiver")),
            *(Figure(f"cpu_s_per_gb_and_receiver/{n}", "s") for n in (1, 2, 4)),
            *(Figure(f"capped_seconds/{n}", "s") for n in (1, 2, 4)),
        ),
    ),
    Benchmark(
        "delta",
        figures=(
            Figure("bytes_share", "x", 0.03),
            Figure("bytes_share_1e_5", "x"),
            Figure("speedup_held_link", "x", 5.0, more_is_better=True),
            Figure("speedup_held_link_1e_5", "x", more_is_better=True),
            Figure("cpu_ratio", "x", is_steady=False),
            Figure("update_1_5b_mb", "MB", 60.0),
        ),
    ),
)

WHOLE = (
    Benchmark(
        "step_overhead",
        quick=("--steps", "9", "--task-runs", "all", "events"),
        figures=(
            Figure("added_s", "s"),
            Figure(
                "flow_cpu_s",
                "s",
                1.0,
                known_miss=KnownMiss(
                    2.0,
                    "two fifths are Prefect's engine for the task runs: flow_cpu_events_s is without them",
                ),
            ),
            Figure("server_cpu_s", "s"),
            Figure("flow_cpu_events_s", "s"),
            Figure("flow_cpu_to_stubs", "x", limit=STUBS),
        ),
    ),
    Benchmark(
        "lag",
        full=("--base64",),
        quick=("--passes", "3"),
        figures=(
            Figure(
                "lag_p99_excess_ms",
                "ms",
                5.0,
                known_miss=KnownMiss(
                    30.0,
                    "it is a wait for a processor or the interpreter's lock: no callback runs longer than 6 ms",
                ),
            ),
            Figure("lag_max_excess_ms", "ms", 30.0),
            Figure("lag_p99_excess_base64_ms", "ms", in_quick=False),
            Figure("lag_max_excess_base64_ms", "ms", in_quick=False),
            Figure("loop_cpu_s", "s"),
            Figure("loop_cpu_to_calibration", "x", limit=LOOP),
        ),
    ),
    Benchmark(
        "submission",
        quick=(),
        figures=(
            Figure("calls_1", "calls", peer=Comparison("one after another", "one_by_one_1"), is_steady=False),
            Figure("calls_16", "calls", peer=Comparison("one after another", "one_by_one_16")),
            Figure(
                "calls_64",
                "calls",
                1.5,
                peer=Comparison("one after another", "one_by_one_64"),
                limit=Comparison("one call"),
                known_miss=KnownMiss(
                    2.6,
                    "each further server delays the last start by 0.4 ms, in the flow or in the stub process: which, is not known",
                ),
            ),
        ),
    ),
    Benchmark(
        "time_to_reward",
        figures=(
            Figure(
                "tiny_step_ratio_to_trl",
                "x",
                2.0,
                peer=Comparison(TRL),
                known_miss=KnownMiss(
                    6.0,
                    "trl is one process, without servers and Prefect; what the step's CPU goes to is not measured",
                ),
            ),
            Figure("speedup_vs_trl_5m", "x", 1.5, more_is_better=True, peer=Comparison(TRL)),
            Figure("end_reward", "x", peer=Comparison(TRL, "end_reward_trl"), is_steady=False),
            Figure("tiny_step_s", "s"),
            Figure("tiny_step_trl_s", "s"),
            Figure("tiny_step_least_s", "s"),
            Figure("tiny_step_trl_least_s", "s"),
            Figure("step_5m_s", "s"),
            Figure("step_5m_trl_s", "s"),
            Figure("step_5m_least_s", "s"),
            Figure("step_5m_trl_least_s", "s"),
        ),
    ),
)

RESTARTED = "a restart from checkpoints, computed"

FAILURES = (
    Benchmark(
        "failures",
        figures=(
            Figure(
                "effective_share_3min",
                "x",
                0.8,
                more_is_better=True,
                peer=Comparison(RESTARTED, "peer_share_3min"),
                is_steady=False,
            ),
            Figure(
                "effective_share_1min",
                "x",
                more_is_better=True,
                peer=Comparison(RESTARTED, "peer_share_1min"),
                is_steady=False,
            ),
            Figure("by_own_steps_3min", "x", more_is_better=True, is_steady=False),
            Figure("by_undisturbed_3min", "x", more_is_better=True, is_steady=False),
            Figure("modelled_share_1min", "x", more_is_better=True, is_steady=False),
            Figure("modelled_share_10min", "x", more_is_better=True, is_steady=False),
            Figure("lost_trajectory_seconds", "s", 0.0, is_exact=True),
            Figure("findings", "findings", 0.0, is_exact=True),
            Figure("cut_trajectories", "trajectories"),
            Figure("worst_role_s", "s"),
            Figure("mean_cost_s", "s"),
        ),
        timeout_s=4800.0,
    ),
)

BENCHMARKS = (*ROLLOUTS, *STORING, *TRAINING, *SYNC, *WHOLE, *FAILURES)
