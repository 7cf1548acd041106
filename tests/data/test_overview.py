from data.overview import MOST_ROWS, overview


def test_columns_are_aligned_and_lines_end_without_blanks():
    assert overview(("column", "kind"), [("x", "number"), ("a long name", "category")]) == [
        "  column       kind",
        "  x            number",
        "  a long name  category",
    ]


def test_of_many_rows_it_says_how_many_more_there_are_unless_it_is_one():
    lines = overview(("column",), [(f"x{k}",) for k in range(MOST_ROWS + 3)])
    assert len(lines) == 1 + MOST_ROWS + 1
    assert lines[-1] == "  ... and 3 more"
    assert overview(("column",), [(f"x{k}",) for k in range(MOST_ROWS + 1)])[-1] == f"  x{MOST_ROWS}"


def test_a_cell_is_one_line_without_commands_to_a_terminal_and_cut_where_it_is_long():
    assert overview(("name\x1b[31m\n", "note"), [("y" * 100, "z" * 300)]) == [
        "  name\\x1b[31m\\n" + " " * 58 + "note",
        "  " + "y" * 67 + "...  " + "z" * 197 + "...",
    ]
