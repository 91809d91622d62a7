"""Tables of documents, made from the rows of loops."""

import pytest

from benchmarks import published
from benchmarks.results import Table

FIELDS = ("loop", "size", "model", "implementation", "status", "ms", "ratio", "peak_mb", "baseline")


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()

    def rows(*values):
        table = [dict(zip(FIELDS, (*map(str, row), "pyg"), strict=True)) for row in values]
        Table(tmp_path / "results" / "loops.csv", FIELDS).append(table)

    return rows


def test_factors_are_geometric_means_with_their_range(write):
    write(
        ("molecules", "", "gin", "pyg", "ok", 8, "", ""),
        ("molecules", "", "gin", "ours", "ok", 4, 2, ""),
        ("molecules", "", "gat", "pyg", "ok", 2, "", ""),
        ("molecules", "", "gat", "ours", "ok", 0.25, 8, ""),
        ("molecules", "", "gat", "ours_captured", "WRONG", "", "", ""),
    )
    assert published.loops().splitlines()[-1] == "| batches of molecules | 4 | 4 (2 to 8) |"


def test_edge_networks_have_a_time_and_a_peak(write):
    ways = ("pyg", *published.WAYS_TO_TRAIN)
    write(*(("edge_networks", "h64", model, way, "ok", 9.5, 1, 2310 if way == "pyg" else "")
            for model in published.EDGE_NETWORKS for way in ways))  # fmt: skip
    assert "| `NNConv`, 64 | 9.5 / 2,310 | 9.5 | 9.5 | 9.5 | 9.5 |" in published.edge_networks()


@pytest.fixture
def proofs(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROOT", tmp_path)
    folder = tmp_path / "results" / "proofs"
    folder.mkdir(parents=True)
    return folder


def test_proofs_are_counted_per_machine(proofs):
    header, rest = "name,outcome,reason,digest\n", "no disk,passed,,abc\nno GPU,skipped,needs one,abc\n"
    (proofs / "faults-x86_64.csv").write_text(header + rest)
    (proofs / "soak-samples-x86_64.csv").write_text("seconds,steps\n1,2\n")
    assert published.proofs().splitlines()[2:] == ["| faults | x86_64 | 1 | 1 | 0 | needs one | abc |"]
    assert published.outcomes("faults").splitlines()[-1] == "| x86_64 | no GPU | skipped | needs one |"
    assert len(published.outcomes("soak").splitlines()) == 2


def test_layers_with_the_same_bits_share_a_row(proofs):
    fields = ("op", "dtype", "setting", "outcome", "reason", *published.BITS)
    rows = [
        (op, dtype, "default", "passed", reason, "bit-equal", *3 * ["bit-equal"], device)
        for op, reason in (("A", ""), ("B", "PyG's code: few"), ("C", ""))
        for dtype, device in (("float32", "not run"), ("bfloat16", "differs" if op == "C" else "not run"))
    ]
    table = [dict(zip(fields, row, strict=True)) for row in rows]
    Table(proofs / "determinism-gpu.csv", fields).append(table)
    equal = "bit-equal | bit-equal | bit-equal | bit-equal"
    assert published.determinism().splitlines()[2:] == [
        f"| gpu | default | A, B (PyG's code) | {equal} | not run |",
        f"| gpu | default | C | {equal} | float32 not run, bfloat16 differs |",
    ]


@pytest.mark.parametrize("word, status", [("--help", 0), ("everything", 2)])
def test_words_write_nothing(word, status, monkeypatch):
    monkeypatch.setattr("sys.argv", ["published", word])
    monkeypatch.setattr(published, "documents", lambda: pytest.fail("documents were read"))
    with pytest.raises(SystemExit) as ended:
        published.main()
    assert ended.value.code == status
