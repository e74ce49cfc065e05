"""The ledger every adapter shares: replaced exactly, restored exactly, strangers noticed."""

import subprocess
import sys

import pytest
from torch import nn

from whorl.adapters._install import Installation


def test_ledger_restores_classes_and_children_and_notices_strangers():
    class Owner:
        @staticmethod
        def act():
            return "before"

    class Child(Owner):
        pass

    parent, child = nn.Sequential(nn.Identity()), nn.ReLU()
    raw = vars(Owner)["act"]
    first = parent[0]
    installation = Installation("test")
    installation.replace(Owner, "act", staticmethod(lambda: "after"), "why")
    installation.replace(Child, "act", staticmethod(lambda: "child"), "why")
    installation.replace(parent, "0", child, "why")
    assert (Owner.act(), Child.act(), parent[0]) == ("after", "child", child)
    with pytest.raises(RuntimeError, match="has no 'missing' to replace"):
        installation.replace(Owner, "missing", None, "why")
    ours, Owner.act = vars(Owner)["act"], staticmethod(lambda: "stranger")
    with pytest.raises(RuntimeError, match=r"Owner\.act was replaced again by another library"):
        installation.uninstall()
    assert Child.act() == "child"
    Owner.act = ours
    installation.uninstall()
    assert vars(Owner)["act"] is raw
    assert "act" not in vars(Child)
    assert parent[0] is first
    assert list(parent._modules) == ["0"]


def test_import_changes_and_loads_nothing():
    code = "import sys, whorl.adapters.megatron; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
