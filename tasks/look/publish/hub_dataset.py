"""A data set repository of the Hugging Face hub: a folder of Parquet files for each table, and a card that describes them."""

import io
import re
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import DatasetInfo, Features
from datasets.info import DatasetInfosDict
from huggingface_hub import CommitOperationAdd, DatasetCard, HfApi

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.publish.stored_parts import Mark, StoredPart

CARD = "README.md"
# The hub limits commits to some hundred an hour, and advises at most some dozens of files in one.
FILES_PER_COMMIT = 50
BYTES_PER_COMMIT = 1 << 28
_NEW_CARD = "---\nconfigs: []\n---\n\nRows of reinforcement learning runs, published by Rollmill. Each file has the rows of one step of a run.\n"
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_FILE = re.compile(r"(?P<part>.+)\.(?P<rows>\d+)-(?P<checksum>[0-9a-f]{8})\.parquet")


class HubDataset:
    """The files TABLE/RUN/PARTITION.ROWS-CHECKSUM.parquet of a repository; the name of a part's last file is its mark.

    Files are gathered and committed together. A commit that another process preceded is refused by the hub.
    """

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError("--to", f"huggingface:{name}", "give the repository as USER/NAME")
        self._name, self._api = name, HfApi()
        # A new repository is private: rows have prompts and answers.
        self._api.create_repo(name, repo_type="dataset", private=True, exist_ok=True)
        found = self._api.dataset_info(name)
        files = [each.rfilename for each in found.siblings or ()]
        self._parent = found.sha
        self._card = DatasetCard(self._read_card() if CARD in files else _NEW_CARD)
        self._marks: dict[str, Mark] = {}
        for match in filter(None, map(_FILE.fullmatch, files)):
            mark = Mark(int(match["rows"]), int(match["checksum"], 16))
            self._marks[match["part"]] = max(mark, self._marks.get(match["part"], mark))
        self._gathered: dict[str, bytes] = {}

    def read_mark(self, part: StoredPart) -> int:
        """Return the packed mark of what the repository has of a part; 0: nothing."""
        return self._marks.get(_file_stem(part), Mark(0, 0)).packed

    def append(self, part: StoredPart, rows: pa.Table, mark: Mark) -> None:
        """Add a file with rows to the next commit, which is made when there is enough for one."""
        file = io.BytesIO()
        pq.write_table(rows, file, compression="zstd")
        stem = _file_stem(part)
        self._gathered[f"{stem}.{mark.rows}-{mark.checksum:08x}.parquet"] = file.getvalue()
        self._marks[stem] = mark
        self._describe(part.table, rows.schema)
        if (
            len(self._gathered) >= FILES_PER_COMMIT
            or sum(map(len, self._gathered.values())) >= BYTES_PER_COMMIT
        ):
            self.finish()

    def finish(self) -> None:
        """Commit the files that were gathered, and the card."""
        if not self._gathered:
            return
        names = list(self._gathered)
        files = self._gathered | {CARD: str(self._card).encode()}
        made = self._api.create_commit(
            self._name,
            [CommitOperationAdd(path, content) for path, content in files.items()],
            commit_message=f"{len(names)} files: {names[0]} to {names[-1]}",
            commit_description="\n".join(names),
            repo_type="dataset",
            parent_commit=self._parent,
        )
        self._parent, self._gathered = made.oid, {}

    def _read_card(self) -> str:
        file = self._api.hf_hub_download(self._name, CARD, repo_type="dataset", revision=self._parent)
        return Path(file).read_text()

    def _describe(self, table: str, schema: pa.Schema) -> None:
        """Add a table and its columns to the card; readers fill columns that earlier files lack with null."""
        data, known = self._card.data, DatasetInfosDict.from_dataset_card_data(self._card.data)
        before = [known[table].features.arrow_schema] if table in known else []
        features = Features.from_arrow_schema(pa.unify_schemas([*before, schema.remove_metadata()]))
        DatasetInfosDict({table: DatasetInfo(features=features)}).to_dataset_card_data(data)
        configs = {each["config_name"]: each for each in data.get("configs") or ()}
        configs.setdefault(table, {"config_name": table, "data_files": f"{table}/**/*.parquet"})
        data["configs"] = list(configs.values())


def _file_stem(part: StoredPart) -> str:
    # The hub and its readers give some characters in paths a meaning.
    return f"{part.table}/{part.run}/{quote(part.place, safe='/=').replace('%', '~')}"
