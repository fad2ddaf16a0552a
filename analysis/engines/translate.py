"""Carries DuckDB's SQL over to Apache Spark's, by sqlglot and the rules below; what is not known to mean the same is
refused.

sqlglot translates the grammar: `//` to DIV, `list` to collect_list, NULLS LAST where DuckDB has it by default,
`concat` that skips NULL, `unnest(range(a, b))` to explode of a guarded sequence. The rules here are for meaning,
where the same words give other numbers or another text:

    raw.samples                 raw_samples: Spark's temporary views have no schemas
    $name                       the value itself, as a literal
    1.5                         1.5E0: a decimal constant becomes a double, as DuckDB's division makes it
    CAST(x AS BIGINT)           of bround(x): DuckDB rounds half to even, Spark cuts off
    CAST(x AS VARCHAR)          doubles in DuckDB's notation: 1e+16 and 10000000.0, not 1.0E16 and 1.0E7
    TRY_CAST(sum(x) AS BIGINT)  of try_sum: NULL where it overflows; a plain sum beyond 64 bits is Spark's error
    round(x, n)                 of the double's exact value, as DuckDB: 0.15, a little less than that, to 0.1
    floor(x), ceil(x)           as doubles
    log(x)                      log10(x); Spark's is the natural one
    regexp_replace(s, p, r)     the first match only
    list_extract(l, i)          NULL where there is no such element
    list_sort(l)                sort_array, which is compiled; array_sort calls a comparison for each pair
    quantile_cont(x, p)         percentile(x, p)
    * REPLACE (e AS c)          * EXCEPT (c), e AS c: the column comes last
    ORDER BY window functions   of a subquery that has them as columns
    WITH name AS (...)          a view of its own, kept while the query runs where it is read more than once: Spark
                                would compute it once for each time, and plans of plans outgrow its memory

NULL elements are left out of `list`, and a division by zero is an error where DuckDB gives infinity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from nanalyze.rundir.errors import QueryError

if TYPE_CHECKING:
    from sqlglot import exp

INSTALL = "Install it with: pip install 'nanalyze[spark]'."
REMEDY = "docs/spark.md lists what Spark runs; without --engine the query runs on DuckDB."

# Nodes of sqlglot's tree that mean the same in both, as they stand or by a rule below; tested on both engines.
KNOWN = frozenset(
    re.findall(
        r"\w+",
        """
    Abs Add Alias And Anonymous AnyValue ArgMax ArgMin Array ArrayAgg ArraySort Avg Between Boolean CTE Case Cast Ceil
    Coalesce Column ColumnDef Concat ConcatWs Count DPipe DataType DenseRank Distinct Div EQ Except Exists Exp Explode
    Filter Floor From GT GTE GenerateSeries Greatest Group Having Identifier If IgnoreNulls In IntDiv Intersect Is
    IsNan Join LT LTE Lag Lead Least Left Length Like Limit Literal Ln Log LogicalAnd LogicalOr Lower Max Median Min Mod
    Mul NEQ Neg Not Ntile Null NullSafeEQ NullSafeNEQ Nullif Offset Or Order Ordered Paren PercentileCont Placeholder
    Pow PropertyEQ Qualify Quantile Rank RegexpLike RegexpReplace Replace Right Round RowNumber Select Sign Sqrt Star
    Stddev StddevPop StddevSamp Struct Sub Subquery Sum Table TableAlias TryCast Tuple Union Upper Values Variance
    VariancePop Where Window WindowSpec With
    """,
    )
)
FUNCTIONS = frozenset({"list_extract"})  # by name: sqlglot has no node for them
INTEGERS = frozenset({"TINYINT", "SMALLINT", "INT", "BIGINT"})
TYPES = INTEGERS | {"DOUBLE", "FLOAT", "TEXT", "VARCHAR", "BOOLEAN", "STRUCT"}


@dataclass(frozen=True)
class Step:
    """A statement of Spark's that becomes the view `name`; the last of a query has no name, its rows are the result."""

    name: str
    sql: str
    is_kept: bool  # read more than once


def to_spark(sql: str, values: Mapping[str, object] | None = None) -> str:
    """One SELECT of DuckDB as one of Spark, `$name` replaced by `values`. Raises QueryError."""
    return _text(carried(sql, values))


def steps(sql: str, values: Mapping[str, object] | None = None, prefix: str = "_with_") -> list[Step]:
    """The same with each common table expression as a view, whose name begins with `prefix`. Raises QueryError."""
    from sqlglot import exp

    tree = carried(sql, values)
    with_ = tree.args.get("with_")
    if with_ is None:
        return [Step("", _text(tree), False)]
    tree.set("with_", None)
    found: list[Step] = []
    for place, cte in enumerate(with_.expressions):
        own, name = cte.alias_or_name, prefix + cte.alias_or_name
        is_recursive = with_.recursive and _reads(cte.this, own) > 0
        later = [*(other.this for other in with_.expressions[place + 1 :]), tree]
        again = with_.recursive and any(
            _reads(other.this, own) and _reads(other.this, other.alias_or_name)
            for other in with_.expressions[place + 1 :]
        )
        reads = sum(_renamed(scope, own, name) for scope in later)
        body = cte.this
        if is_recursive or cte.args["alias"].columns:
            body = exp.select("*").from_(exp.to_table(own))
            body.set("with_", exp.With(expressions=[cte.copy()], recursive=is_recursive))
        found.append(Step(name, _text(body), reads > 1 or again))
    return [*found, Step("", _text(tree), False)]


def _reads(scope: exp.Expr, name: str) -> int:
    return len(_tables(scope, name))


def _tables(scope: exp.Expr, name: str) -> Sequence[exp.Table]:
    from sqlglot import exp

    return [t for t in scope.find_all(exp.Table) if not t.args.get("db") and t.name.lower() == name.lower()]


def _renamed(scope: exp.Expr, name: str, new: str) -> int:
    """Have `scope` read `new` where it reads `name`, under the alias that its columns are called by; how often."""
    from sqlglot import exp

    tables = _tables(scope, name)
    for table in tables:
        if not table.alias:
            table.set("alias", exp.TableAlias(this=exp.to_identifier(table.name)))
        table.set("this", exp.to_identifier(new))
    return len(tables)


@cache
def relations(sql: str) -> frozenset[str]:
    """Tables and views that a SELECT reads, `raw.` in front of those of that schema. Raises QueryError."""
    from sqlglot import exp

    tree = _parsed(sql)
    own = {cte.alias_or_name.lower() for cte in tree.find_all(exp.CTE)}
    found = set()
    for table in tree.find_all(exp.Table):
        name = table.name.lower()
        if table.db.lower() == "raw":
            found.add(f"raw.{name}")
        elif name not in own or table.db:
            found.add(name)
    return frozenset(found)


def carried(sql: str, values: Mapping[str, object] | None = None) -> exp.Expr:
    """The tree of Spark's statement. Raises QueryError."""
    tree = _parsed(sql)
    _check(tree)
    # Innermost first, so that a rule sees operands that are done.
    for node in reversed(list(tree.walk())):
        new = _carried(node, values or {})
        if new is node:
            continue
        if node is tree:
            tree = new
        else:
            node.replace(new)
    return tree


def _parsed(sql: str) -> exp.Expr:
    try:
        import sqlglot
        from sqlglot.errors import SqlglotError
    except ImportError:
        raise QueryError(f"--engine spark needs the package sqlglot. {INSTALL}") from None
    try:
        statements = [statement for statement in sqlglot.parse(sql, read="duckdb") if statement is not None]
    except (SqlglotError, RecursionError) as error:
        first = str(error).split("\n", 1)[0].strip().rstrip(".")
        raise QueryError(f"sqlglot cannot read the query: {first}. {REMEDY}") from error
    if len(statements) != 1:
        raise QueryError(f"{len(statements)} statements given. Give one SELECT statement.")
    return statements[0]


def _text(tree: exp.Expr) -> str:
    from sqlglot import ErrorLevel
    from sqlglot.errors import SqlglotError

    try:
        # Databricks' dialect is Spark's with QUALIFY, which Spark has from 4.1 on.
        return tree.sql(dialect="databricks", unsupported_level=ErrorLevel.RAISE, comments=False)
    except SqlglotError as error:
        raise _refused(str(error).split("\n", 1)[0].strip().rstrip(".")) from error


def _refused(what: str) -> QueryError:
    return QueryError(f"{what}: not known to mean the same on Spark. {REMEDY}")


# --- what is refused ---------------------------------------------------------------------------------


def _check(tree: exp.Expr) -> None:
    """QueryError for the first node that has no counterpart of the same meaning."""
    for node in tree.walk():
        for problem in _problems(node):
            raise _refused(problem)


def _problems(node: exp.Expr) -> Iterator[str]:
    from sqlglot import exp

    name = type(node).__name__
    if isinstance(node, exp.Anonymous) and node.name.lower() not in FUNCTIONS:
        yield node.name
    elif name not in KNOWN:
        yield node.sql_name().lower() if isinstance(node, exp.Func) else name.upper()
    elif isinstance(node, exp.Table):
        yield from _table_problems(node)
    elif isinstance(node, exp.Join):
        yield from _join_problems(node)
    elif isinstance(node, exp.DataType) and node.this.name not in TYPES:
        yield f"type {node.sql(dialect='duckdb')}"
    else:
        yield from _argument_problems(node)


def _table_problems(node: exp.Table) -> Iterator[str]:
    from sqlglot import exp

    if not isinstance(node.this, exp.Identifier):
        yield f"table function {node.this.sql(dialect='duckdb')[:60]}"
    elif node.catalog or node.db.lower() not in ("", "main", "raw"):
        yield f"table {node.sql(dialect='duckdb')}"
    elif any(node.args.get(key) for key in ("pivots", "sample", "when", "only", "ordinality", "rows_from")):
        yield f"table {node.name} with PIVOT or a sample"


def _join_problems(node: exp.Join) -> Iterator[str]:
    for word in (node.args.get("method"), node.args.get("kind")):
        if word and word.upper() not in ("INNER", "OUTER", "CROSS"):
            yield f"{word} JOIN"


def _argument_problems(node: exp.Expr) -> Iterator[str]:
    from sqlglot import exp

    if isinstance(node, (exp.Max, exp.Min)) and node.args.get("expressions"):
        yield f"{node.key} with a count"
    elif isinstance(node, exp.Array) and not isinstance(node.parent, (exp.PercentileCont, exp.Quantile)):
        yield "a list of values"
    elif isinstance(node, exp.ArrayAgg) and isinstance(node.this, exp.Order):
        yield "list with ORDER BY"
    elif isinstance(node, exp.Union) and node.args.get("by_name"):
        yield "UNION BY NAME"
    elif isinstance(node, exp.Distinct) and node.args.get("on"):
        yield "DISTINCT ON"
    elif isinstance(node, exp.CTE) and node.args.get("materialized") is not None:
        yield "MATERIALIZED"
    elif isinstance(node, exp.Explode) and not isinstance(node.this, (exp.GenerateSeries, exp.Column)):
        yield "unnest of other than range() and columns"
    elif isinstance(node, exp.GenerateSeries) and not isinstance(node.parent, exp.Explode):
        yield "range() without unnest"
    elif isinstance(node, exp.Like) and not (
        isinstance(node.expression, exp.Literal) and "\\" not in node.expression.name
    ):
        yield "LIKE with other than a constant pattern without backslashes"
    elif isinstance(node, exp.RegexpReplace):
        yield from _replacement_problems(node)


def _replacement_problems(node: exp.RegexpReplace) -> Iterator[str]:
    from sqlglot import exp

    replacement = node.args.get("replacement")
    if not isinstance(replacement, exp.Literal) or set(replacement.name) & set("\\$"):
        yield "regexp_replace with other than a plain text to put in"
    elif node.args.get("modifiers"):
        yield "regexp_replace with options"


# --- rules -------------------------------------------------------------------------------------------


def _carried(node: exp.Expr, values: Mapping[str, object]) -> exp.Expr:
    """What takes the place of `node`, whose own parts are done; `node` itself where no rule applies."""
    from sqlglot import exp

    if isinstance(node, exp.Placeholder):
        return _value(node, values)
    rules: dict[type[exp.Expr], Callable[[exp.Expr], exp.Expr]] = {
        exp.Table: _table, exp.Literal: _literal, exp.Cast: _cast, exp.TryCast: _cast, exp.Round: _round,
        exp.Floor: _whole, exp.Ceil: _whole, exp.Log: _log, exp.RegexpReplace: _first_match,
        exp.Anonymous: _element, exp.ArraySort: _sorted, exp.PercentileCont: _percentile, exp.Quantile: _percentile,
        exp.Select: _select, exp.Concat: _concat, exp.Ntile: _ntile,
    }  # fmt: skip
    rule = rules.get(type(node))
    return node if rule is None else rule(node)


def _table(node: exp.Expr) -> exp.Expr:
    from sqlglot import exp

    if not node.args.get("db"):
        return node
    assert isinstance(node, exp.Table)
    prefix = "raw_" if node.db.lower() == "raw" else ""
    return exp.Table(this=exp.to_identifier(prefix + node.name), alias=node.args.get("alias"))


def _value(node: exp.Placeholder, values: Mapping[str, object]) -> exp.Expr:
    from sqlglot import exp

    if node.name not in values:
        raise QueryError(f"${node.name}: has no value. Give it as a parameter.")
    value = values[node.name]
    if isinstance(value, float):
        return exp.Cast(this=exp.Literal.string(repr(value)), to=exp.DataType.build("DOUBLE"))
    return exp.convert(value)


def _literal(node: exp.Expr) -> exp.Expr:
    """Decimal constants as doubles: Spark would divide decimals with six digits."""
    from sqlglot import exp

    if node.is_string or "." not in node.name or "e" in node.name.lower():
        return node
    return exp.Literal.number(f"{node.name}E0")


def _cast(node: exp.Expr) -> exp.Expr:
    from sqlglot import exp

    assert isinstance(node, exp.Cast)
    kind, operand = node.to.this.name, node.this
    if kind in ("TEXT", "VARCHAR"):
        return node if _is_text(operand) else _number_text(operand)
    if kind not in INTEGERS or _is_whole(operand):
        return node
    if isinstance(node, exp.TryCast) and isinstance(operand, exp.Sum):
        operand = exp.Anonymous(this="TRY_SUM", expressions=[operand.this])
    else:
        operand = exp.Anonymous(this="BROUND", expressions=[operand])
    return type(node)(this=operand, to=node.to)


def _is_whole(node: exp.Expr) -> bool:
    """Whether the rounding of a cast cannot matter, or is not numeric."""
    from sqlglot import exp

    node = node.unnest()
    if isinstance(node, exp.Literal):
        return node.is_int or node.is_string
    if isinstance(node, exp.Cast):
        return isinstance(node.this, (exp.Floor, exp.Ceil)) or node.to.this.name in INTEGERS
    if isinstance(node, exp.Round):
        return not node.args.get("decimals")
    return isinstance(
        node, (exp.Null, exp.Boolean, exp.Count, exp.Predicate, exp.Connector, exp.Not, exp.IntDiv, exp.RowNumber)
    )


def _is_text(node: exp.Expr) -> bool:
    from sqlglot import exp

    node = node.unnest()
    if isinstance(node, exp.Cast):
        return node.to.this.name in ("TEXT", "VARCHAR") or node.to.this.name in INTEGERS
    is_text = isinstance(node, (exp.Concat, exp.ConcatWs, exp.DPipe, exp.Lower, exp.Upper, exp.Replace, exp.Count))
    return is_text or isinstance(node, (exp.Null, exp.Boolean)) or (isinstance(node, exp.Literal) and node.is_string)


# Of the text that Spark gives, only that of a double in scientific notation, NaN or infinity is written anew.
_TEXT = r"""
    CASE
        WHEN CAST(x AS STRING) RLIKE '^-?[0-9][.][0-9]+E-?[0-9]+$' THEN
            CASE
                WHEN CAST(regexp_extract(CAST(x AS STRING), 'E(.*)$', 1) AS INT) BETWEEN -4 AND 15
                    THEN regexp_replace(regexp_replace(
                        CAST(CAST(CAST(x AS STRING) AS DECIMAL(38, 20)) AS STRING), '0+$', ''), '[.]$', '.0')
                ELSE regexp_replace(regexp_replace(regexp_replace(
                    CAST(x AS STRING), '([.]0)?E', 'e+'), 'e[+]-', 'e-'), '(e[+-])([0-9])$', '$10$2')
            END
        WHEN CAST(x AS STRING) = 'NaN' THEN 'nan'
        WHEN CAST(x AS STRING) = 'Infinity' THEN 'inf'
        WHEN CAST(x AS STRING) = '-Infinity' THEN '-inf'
        ELSE CAST(x AS STRING)
    END
"""


def _number_text(operand: exp.Expr) -> exp.Expr:
    return _filled(_TEXT, x=operand)


def _filled(template: str, **parts: exp.Expr) -> exp.Expr:
    """Spark's expression `template` with `parts` in place of the columns of their names."""
    import sqlglot
    from sqlglot import exp

    tree = sqlglot.parse_one(template, read="databricks")
    for column in list(tree.find_all(exp.Column)):
        if column.name in parts and not column.table:
            column.replace(exp.paren(parts[column.name].copy()))
    return tree


# To n digits DuckDB rounds the double's exact value: 0.15, which is a little less, to 0.1. The product x * 10^n may
# itself be rounded up to a half, so what it lacks is worked out as Dekker (1971) does, from the halves of x; f has few
# enough bits for both products to be exact.
_ROUND = """
    CASE
        WHEN abs(CAST(x AS DOUBLE) * f) % 1 = 0.5E0 AND sign(x) * (
            ((x * 134217729E0 - (x * 134217729E0 - CAST(x AS DOUBLE))) * f - CAST(x AS DOUBLE) * f)
            + (CAST(x AS DOUBLE) - (x * 134217729E0 - (x * 134217729E0 - CAST(x AS DOUBLE)))) * f
        ) < 0 THEN (CAST(x AS DOUBLE) * f - (CAST(x AS DOUBLE) * f) % 1) / f
        ELSE round(CAST(x AS DOUBLE) * f) / f
    END
"""


def _round(node: exp.Expr) -> exp.Expr:
    from sqlglot import exp

    digits = node.args.get("decimals")
    if digits is None or (isinstance(digits, exp.Literal) and digits.name == "0"):
        return node
    if not isinstance(digits, exp.Literal) or not digits.is_int:
        raise _refused("round to other than a constant number of digits")
    if not 0 < int(digits.name) <= 7:
        raise _refused("round to more than 7 digits")
    return _filled(_ROUND, x=node.this, f=exp.Literal.number(f"1E{digits.name}"))


def _whole(node: exp.Expr) -> exp.Expr:
    from sqlglot import exp

    return exp.Cast(this=node.copy(), to=exp.DataType.build("DOUBLE"))


def _log(node: exp.Expr) -> exp.Expr:
    from sqlglot import exp

    base = node.this
    if node.args.get("expression") is None:
        return exp.Anonymous(this="LOG10", expressions=[base])
    return node


def _first_match(node: exp.Expr) -> exp.Expr:
    """regexp_instr tells where the first match begins, regexp_substr what it is."""
    return _filled(
        """
        CASE
            WHEN regexp_instr(s, p) = 0 THEN s
            ELSE concat(
                substr(s, 1, regexp_instr(s, p) - 1), r, substr(s, regexp_instr(s, p) + length(regexp_substr(s, p)))
            )
        END
        """,
        s=node.this, p=node.expression, r=node.args["replacement"],
    )  # fmt: skip


def _element(node: exp.Expr) -> exp.Expr:
    """`list_extract`, the only function without a node of its own that passes the check."""
    values, place = node.expressions
    return _filled("try_element_at(l, CAST(nullif(i, 0) AS INT))", l=values, i=place)


def _sorted(node: exp.Expr) -> exp.Expr:
    from sqlglot import exp

    if node.expression is not None:
        raise _refused("list_sort with an order")
    return exp.Anonymous(this="SORT_ARRAY", expressions=[node.this])


def _percentile(node: exp.Expr) -> exp.Expr:
    from sqlglot import exp

    quantile = node.expression or node.args.get("quantile")
    if quantile is None or isinstance(node.this, exp.Order):
        raise _refused(node.key)
    return exp.Anonymous(this="PERCENTILE", expressions=[node.this, quantile])


def _ntile(node: exp.Expr) -> exp.Expr:
    """Spark takes no BIGINT for the number of tiles."""
    from sqlglot import exp

    node.set("this", exp.cast(node.this, "INT", dialect="spark"))
    return node


def _concat(node: exp.Expr) -> exp.Expr:
    """Columns as text, so that a number among them does not make a number of the empty text for NULL."""
    from sqlglot import exp

    parts = [
        exp.cast(part, "TEXT", dialect="spark") if isinstance(part, exp.Column) else part for part in node.expressions
    ]
    node.set("expressions", parts)
    return node


def _select(node: exp.Expr) -> exp.Expr:
    assert node.args.get("expressions") is not None
    _replace_last(node)
    return _ordered_by_columns(node)


def _replace_last(select: exp.Expr) -> None:
    """`* REPLACE (e AS c)` as `* EXCEPT (c), e AS c`."""
    from sqlglot import exp

    added: list[exp.Expr] = []
    for star in [star for item in select.expressions for star in item.find_all(exp.Star) if _is_own(star, item)]:
        replaced = star.args.get("replace") or []
        if replaced:
            names = [exp.to_identifier(item.alias) for item in replaced]
            star.set("except_", [*(star.args.get("except_") or []), *names])
            star.set("replace", None)
            added += replaced
    select.set("expressions", [*select.expressions, *added])


def _is_own(star: exp.Expr, item: exp.Expr) -> bool:
    """Whether the star is this item, alone or behind the name of a table."""
    return star is item or star.parent is item


def _ordered_by_columns(select: exp.Expr) -> exp.Expr:
    """Spark sorts by no window function: they become columns of a subquery, and so do the other keys."""
    from sqlglot import exp

    order = select.args.get("order")
    if order is None or not any(key.find(exp.Window) for key in order.expressions):
        return select
    assert isinstance(select, exp.Select)
    inner = select.copy()
    names = [f"_order_{number}" for number in range(len(order.expressions))]
    for name, key in zip(names, order.expressions, strict=True):
        inner = inner.select(exp.alias_(key.this.copy(), name), copy=False)
    outer = exp.select(exp.Star(except_=[exp.to_identifier(name) for name in names]))
    with_ = inner.args.get("with_")
    for part in ("order", "limit", "offset", "with_"):
        inner.set(part, None)
    outer = outer.from_(inner.subquery("ordered"), copy=False)
    keys = [exp.Ordered(**{**key.args, "this": exp.column(n)}) for n, key in zip(names, order.expressions, strict=True)]
    outer.set("order", exp.Order(expressions=keys))
    for part in ("limit", "offset"):
        outer.set(part, select.args.get(part))
    outer.set("with_", with_)
    return outer
