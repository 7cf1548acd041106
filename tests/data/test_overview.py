from data.overview import MOST_ROWS, overview


def test_columns_are_aligned_without_trailing_spaces():
    assert overview(("column", "kind"), [("x", "number"), ("a long name", "category")]) == [
        "  column       kind",
        "  x            number",
        "  a long name  category",
    ]


def test_long_tables_state_the_number_of_further_rows():
    lines = overview(("column",), [(f"x{k}",) for k in range(MOST_ROWS + 3)])
    assert len(lines) == 1 + MOST_ROWS + 1
    assert lines[-1] == "  ... and 3 more"
    assert overview(("column",), [(f"x{k}",) for k in range(MOST_ROWS + 1)])[-1] == f"  x{MOST_ROWS}"


def test_cells_are_shown_as_one_short_line_without_terminal_escapes():
    assert overview(("name\x1b[31m\n", "note"), [("y" * 100, "z" * 300)]) == [
        "  name\\x1b[31m\\n" + " " * 58 + "note",
        "  " + "y" * 67 + "...  " + "z" * 197 + "...",
    ]
