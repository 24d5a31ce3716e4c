"""Which test runs each documented command, or why none can: data. test_documented_runs.py checks it.

A command in a fence is run; one in a sentence is of a kind that is run. A file runs its commands in the order of this table.
"""

REST = ("the other commands in fences of the page",)

SCENES = "tests/flows/documented"
STORED_RUN = f"{SCENES}/test_stored_run_pages.py"
RESCORING = f"{SCENES}/test_rescoring_pages.py"
DISTILLATION = f"{SCENES}/test_distillation_page.py"
QUICKSTART = f"{SCENES}/test_quickstart_page.py"
NODES = f"{SCENES}/test_nodes_page.py"
DEPLOYMENTS = f"{SCENES}/test_deployments_pages.py"
IMPROVEMENT = f"{SCENES}/test_improve_page.py"
TUTORIAL = "tests/flows/test_product.py"
SECRETS = "tests/deploy/test_compose.py"

RUN_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "README.md": {
        STORED_RUN: (
            "rollmill run PRESET",
            "rollmill view quickstart",
            "rollmill inspect quickstart",
            "rollmill inspect quickstart --status failed",
            "rollmill show quickstart 12.3 --by advantage",
            "rollmill plot quickstart",
            "rollmill list",
            "rollmill memory PRESET",
            "rollmill settings",
        ),
        QUICKSTART: ('export PATH="$PWD/.venv/bin:$PATH"', "make quickstart", "make help"),
        DEPLOYMENTS: (
            "make deploy",
            "PREFECT_API_URL=http://127.0.0.1:4200/api prefect worker start --pool rollmill",
            "rollmill run quickstart --deployment --name first --set steps=2",
        ),
    },
    "how-to/looking.md": {STORED_RUN: (*REST, "rollmill export RUN --to parquet")},
    "how-to/viewer.md": {STORED_RUN: REST},
    "reference/spans.md": {STORED_RUN: REST},
    "how-to/operations.md": {STORED_RUN: REST},
    "reference/algorithms.md": {STORED_RUN: REST},
    "how-to/queries.md": {STORED_RUN: REST},
    "skills/compare-two-runs/SKILL.md": {STORED_RUN: REST},
    "how-to/publish.md": {STORED_RUN: REST},
    "how-to/checkpoints.md": {
        STORED_RUN: ("rollmill export-policy RUN FOLDER --version 40",),
        NODES: REST,
    },
    "explanation/lineage.md": {STORED_RUN: REST},
    "reference/storage.md": {STORED_RUN: REST},
    "lab/scale.md": {STORED_RUN: ("python -m rollmill.tasks.train.engine.memory_plan",)},
    "how-to/compaction.md": {STORED_RUN: ("rollmill compact RUN",)},
    "reference/datasets.md": {STORED_RUN: ("rollmill verify RUN",)},
    "how-to/rescoring.md": {RESCORING: REST},
    "how-to/cluster.md": {
        SECRETS: (
            "umask 077",
            'while read -r line; do echo "$line$(openssl rand -hex 24)"; done < deploy/secrets.example > .env',
            "mkdir -p models data project",
            "kubectl -n rollmill create secret generic prefect-server --from-env-file=<(grep -E '^(POSTGRES|REDIS|PREFECT)' .env)",
            "kubectl -n rollmill create secret generic rollmill-run --from-env-file=<(grep -vE '^(POSTGRES|REDIS)' .env)",
        ),
    },
    "tutorials/tutorial.md": {
        TUTORIAL: REST,
        QUICKSTART: ('export PATH="$PWD/.venv/bin:$PATH"',),
    },
    "how-to/ab.md": {RESCORING: REST},
    "lab/learning.md": {RESCORING: REST},
    "how-to/distillation.md": {DISTILLATION: REST},
    "tutorials/quickstart.md": {QUICKSTART: REST},
    "how-to/gpu.md": {STORED_RUN: ("rollmill memory gsm8k --gpu 80",)},
    "how-to/deployments.md": {
        DEPLOYMENTS: (*REST, "prefect work-queue set-concurrency-limit gpus 2 --pool rollmill"),
    },
    "how-to/promotion.md": {DEPLOYMENTS: REST},
    "tutorials/improve.md": {IMPROVEMENT: ("rollmill run quickstart --set steps=1", *REST)},
}
"""By page, by test file: the commands, as the page has them."""

NOT_RUN: dict[str, dict[str, tuple[str, ...]]] = {
    "README.md": {
        "it installs packages of Debian as root": (
            "apt install make git g++ python3.11-venv python3.11-dev",
        ),
        "`make test` and `make test-all` begin with it": ("make setup",),
    },
    "how-to/cluster.md": {
        "it needs Docker's daemon and the images, of several GB": (
            "docker compose --env-file deploy/laptop.env --env-file .env build",
            "docker compose --env-file deploy/laptop.env --env-file .env up --detach --wait",
            "docker compose --env-file deploy/laptop.env --env-file .env exec worker prefect deployment run post-train/cluster --watch",
        ),
        "it needs a Kubernetes cluster; tests/deploy/test_kubernetes.py checks the manifests": (
            "kubectl create namespace rollmill",
            "kubectl apply -k deploy/kubernetes",
            "kubectl -n rollmill port-forward service/prefect 4200:4200",
        ),
    },
    "how-to/gpu.md": {
        "it needs GPUs with 80 GB, and a model and a data set of the Hugging Face hub": (
            "rollmill run gsm8k",
            "rollmill run gsm8k --set train.ranks=4 --set serve.servers=4 --set serve.share_gpus=false --set serve.gpu_memory_utilization=0.9",
        ),
    },
}
"""By page, by reason: commands in fences that no test can run."""

KINDS_RUN_BY = {
    "rollmill doctor": "tests/flows/test_doctor.py",
    "rollmill down": "tests/flows/test_product.py",
    "rollmill init": "tests/flows/test_new_project.py",
    "rollmill mcp": "tests/looking/test_run_tools.py",
    "rollmill new": "tests/flows/test_new_project.py",
    "rollmill setup": "tests/looking/test_base_install.py",
    "rollmill verify-sync": "tests/flows/test_verify_sync.py",
    "rollmill vllm": "tests/flows/test_two_nodes.py",
    "kubectl kustomize": "tests/deploy/test_kubernetes.py",
    "pip install": "tests/looking/test_base_install.py",
    "prefect server": "tests/stubs/prefect_cluster.py",
}
"""By kind: a file of the tests with the words of such a command."""

KINDS_NOT_RUN = {
    "they are tests themselves": (
        "make check",
        "make rehearsal",
        "make test",
        "make test-all",
        "python -m pytest",
    ),
    "they are measurements of minutes to hours": ("make bench", "make bench-full", "python -m benchmarks"),
    "it is `make setup`": ("make PYTHON=/path/to/python3.11",),
    "it removes the environments": ("make clean",),
    "it serves until Ctrl-C; tests/documentation/test_site.py builds the same site": ("make docs",),
    "tests/conftest.py builds the same files, and tests/test_package.py reads them": ("make release",),
    "it needs Docker's daemon": ("docker build", "docker run"),
    "it needs a Kubernetes cluster": ("kubectl delete",),
    "it needs an account": ("aws s3", "hf auth"),
    "the tests' packages have the writer alone, tensorboardX": ("tensorboard --logdir",),
}
"""By reason: kinds of commands that only sentences name and no test runs."""

CHANGED = {
    "": {
        "http://127.0.0.1:4200/api": "{api}",
        "rollmill view": "rollmill view --no-browser --port 0",
        "PRESET": "quickstart",
        "RUN": "quickstart",
        "FOLDER": "exported",
        "http://127.0.0.1:4318": "{otlp}",
        "s3://my-bucket/team/runs": "{bucket}",
        'export PATH="$PWD/.venv/bin:$PATH"': 'export PATH="$PWD/.venv/bin:$PATH"; command -v rollmill',
        "make quickstart": "make --assume-old=setup quickstart",
        "make deploy": "make --assume-old=setup deploy",
    },
    "README.md": {"12.3": "2.3"},
    "how-to/ab.md": {"steps=10": "steps=2"},
    "how-to/checkpoints.md": {
        "40": "3",
        "train.ranks=16": "train.ranks=2",
        "10.0.0.1": "127.0.0.1",
        "8500": "{trainer_port}",
        "29400": "{meeting_port}",
    },
    "how-to/deployments.md": {"evaluate quickstart --version 20": "evaluate first --version 2"},
    "how-to/distillation.md": {"steps=20": "steps=2"},
    "how-to/looking.md": {"calculator": "quickstart", "784.6": "5.1", "20:24": "0:2", "24": "2"},
    "how-to/operations.md": {"20": "2"},
    "how-to/promotion.md": {"000040": "000002", "rollmill promote": "rollmill promote --yes"},
    "how-to/publish.md": {"other": "warmer"},
    "how-to/rescoring.md": {"steps=10": "steps=2", "20": "2", "40": "3"},
    "lab/learning.md": {"ab-estimate-quickstart-0": "base0", "steps=10": "steps=2"},
    "reference/spans.md": {"12": "2"},
    "explanation/lineage.md": {"000040": "000003"},
    "skills/compare-two-runs/SKILL.md": {"A B": "quickstart warmer"},
    "tutorials/improve.md": {
        "models/start-...": "models/start-*/",
        "8000": "{vllm_port} --enforce-eager",  # or vLLM compiles for a minute
        "steps=10": "steps=2",
        "--min-reward 0.3": "--min-reward 0 --margin 1",  # whatever it has learned, it passes
        "rollmill up": "env --unset=PREFECT_API_URL rollmill up --port {prefect_port}",
    },
}
"""By page, or "" for all: the names, numbers and addresses that a small run has instead of the page's."""
