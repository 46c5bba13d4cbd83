"""What agent, master and workers take for granted is said in one place, and the pages say the same."""

from __future__ import annotations

import ast
import re
import sys

import pytest

from dalsegno.agent.commands.arguments import build_parser
from dalsegno.protos import contract, control_pb2
from dalsegno.protos.contract import JobSettings, Variable
from tests.support.pages.sources import ROOT, imports, parsed, product_files

CONTRACTS = (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")
# ms-swift takes no flags of ours: two words of the plugin's own.
PLUGIN = {"DALSEGNO_GLOBAL_BATCH_SIZE", "DALSEGNO_FIXED_MICRO_BATCH", "DALSEGNO_MEMORY_EVERY", "DALSEGNO_STAY"}
NAMES = {value for name, value in vars(Variable).items() if name.isupper()}
SECRETS = {Variable.TOKEN, Variable.ADMIN_TOKEN}
FOR_WORKERS = NAMES - SECRETS - {Variable.MASTER, Variable.FLAG, Variable.MASTER_FLAG}


def test_it_needs_nothing() -> None:
    """Every process of a job imports it, also those that must import nothing."""
    path = ROOT / "protos" / "contract.py"
    found = {name.split(".")[0] for _, name, _ in imports(path.relative_to(ROOT), ast.parse(path.read_text()))}
    assert found <= sys.stdlib_module_names


def test_settings_are_the_wire_s_and_the_command_line_s() -> None:
    """Each setting is a field of the message and a flag, and its default is the flag's."""
    assert list(JobSettings.names()) == [field.name for field in control_pb2.Settings.DESCRIPTOR.fields]
    flags = vars(build_parser({}).parse_args(["train.py"]))
    own = JobSettings()
    for name in JobSettings.names()[2:]:
        assert flags[name] == getattr(own, name), name


@pytest.mark.parametrize("path", product_files(), ids=str)
def test_no_variable_is_spelt_twice(path: object) -> None:
    """A name that two files spell is a name that one of them gets wrong one day."""
    if str(path) == "protos/contract.py":
        return
    tree = parsed((ROOT / str(path)).read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    spelt = {text for text in texts if re.fullmatch(r"DALSEGNO_[A-Z_]+|DLROVER_MASTER_ADDR", text)}
    assert spelt <= PLUGIN


def test_the_page_has_the_variables_for_people() -> None:
    """Those that our plugin of ms-swift reads, in the paragraph behind the table."""
    (paragraph,) = (one for one in CONTRACTS.split("\n\n") if one.startswith("Four more variables are for people"))
    text = (ROOT / "swift_plugin" / "hf" / "options.py").read_text(encoding="utf-8")
    read = set(re.findall(r'^[A-Z_]+ = "(DALSEGNO_[A-Z_]+)"$', text, re.MULTILINE))
    assert set(re.findall(r"DALSEGNO_[A-Z_]+", paragraph)) == read
    assert len(read) == 4


def test_the_page_has_every_variable_and_exit_code() -> None:
    """What a worker is given, and what its end means."""
    table = CONTRACTS[: CONTRACTS.index("Four more variables are for people")]
    assert set(re.findall(r"DALSEGNO_[A-Z_]+", table)) == FOR_WORKERS
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    codes = {value for name, value in vars(contract).items() if name.startswith("EXIT_")}
    assert set(map(int, re.findall(r"^\| (\d+) \| dlrover-run \|", reference, re.MULTILINE))) == codes
    codes = {contract.EXIT_FINISHED, contract.EXIT_FAILED, contract.EXIT_USAGE}
    codes |= {value for name, value in vars(contract).items() if re.fullmatch(r"MASTER_(HUNG|SUPERSEDED)", name)}
    assert set(map(int, re.findall(r"^\| (\d+) \| dlrover-master \|", reference, re.MULTILINE))) == codes
    assert f"and with {contract.COMMAND_INTERRUPTED} after Ctrl-C" in reference
    codes = {value for name, value in vars(contract).items() if re.fullmatch(r"WORKER_(DRAINED|BAD_CHECKPOINT)", name)}
    assert set(map(int, re.findall(r"^\| (\d+) \| worker \|", reference, re.MULTILINE))) == codes
