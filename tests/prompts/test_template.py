"""Templates over rows: nothing is put out by mistake, and nothing runs for ever (A16, B07, B08)."""

import json
import subprocess
import sys

import pytest

from batchgen.errors import JobFileError
from batchgen.job.spec import Limits, Prompt
from batchgen.prompts.budget import TemplateLimits
from batchgen.prompts.failure import RowFailure
from batchgen.prompts.template import RowTemplate
from batchgen.prompts.templates import PromptTemplates

LETTER = "Dear {{ name }} of {{ city }}: {{ text }}"


def render(source, /, limits=None, **values):
    return RowTemplate(source, "prompt.text", limits or TemplateLimits()).render(values)


def failure(source, /, **values):
    with pytest.raises(RowFailure) as caught:
        render(source, **values)
    return caught.value.error


def test_B07_present_values_are_put_in():
    assert render(LETTER, name="Ann", city="Oslo", text="plain") == "Dear Ann of Oslo: plain"
    assert render(LETTER, name="Dee", city="", text="empty city") == "Dear Dee of : empty city"


@pytest.mark.parametrize("values", [{}, {"city": None}])
def test_B07_absent_and_null_are_errors_that_name_the_variable(values):
    error = failure(LETTER, name="Ben", text="x", **values)
    assert error.kind == "template_undefined"
    assert "'city'" in error.message


def test_B07_data_is_never_rendered():
    data = "{name} {{ name }} {% if x %} {# c #} $name ${name} %s {0} }{"
    assert render(LETTER, name="Eve", city="Rom", text=data) == f"Dear Eve of Rom: {data}"


def test_B07_single_braces_are_text():
    source = 'Answer as {"name": "{{ name }}", "tags": ["{x}"]}'
    assert render(source, name="Ann") == 'Answer as {"name": "Ann", "tags": ["{x}"]}'


def test_B07_unknown_column_stops_the_job_with_the_columns_and_a_guess():
    templates = PromptTemplates(Prompt(text="Dear {{ nmae }} {{ city }}"), Limits())
    with pytest.raises(JobFileError, match=r"no column 'nmae'. Did you mean 'name'\? It has: city, name, text"):
        templates.check_columns(["name", "city", "text"])
    templates.check_columns(["city"], has_column=lambda name: name == "nmae" or name == "city")


def test_B07_default_makes_a_column_optional():
    templates = PromptTemplates(Prompt(text="{{ a | default('x') }}{% if b is defined %}y{% endif %}{{ c }}"), Limits())
    templates.check_columns(["c"])
    assert templates.columns == {"a", "b", "c"}
    assert render("{{ a | default('x') }}", a=None) == "x"
    assert render("{% if a %}yes{% else %}no{% endif %}{{ 1 if a is none else 2 }}", a=None) == "no1"


def test_B07_odd_column_names_are_reached_through_row():
    template = RowTemplate("{{ row['Review text'] }} {{ row.id }} {{ a }}", "prompt.text", TemplateLimits())
    assert template.columns == {"Review text", "id", "a"}
    assert template.render({"Review text": "x", "id": 1, "a": "y"}) == "x 1 y"
    assert failure("{{ row['Review text'] }}!").message == "prompt.text: 'Review text' is missing in this row"
    assert failure("{{ row['Review text'] }}!", **{"Review text": None}).kind == "template_undefined"
    assert failure("{{ row['Review text'] }}", **{"Review text": 3}).kind == "not_text"
    assert render("{{ row['a b'] | default('x') }}") == "x"


def test_B07_a_loop_may_call_its_variable_row():
    template = RowTemplate("{% for row in table %}{{ row.name }}{% endfor %}", "prompt.text", TemplateLimits())
    assert template.columns == {"table"}
    assert template.render({"table": [{"name": "a"}, {"name": "b"}]}) == "ab"


def test_a_column_may_be_called_as_a_function_of_jinja():
    template = RowTemplate("{{ range }}{{ dict(a=1).a }}!", "prompt.text", TemplateLimits())
    assert template.columns == {"range"}
    assert template.render({"range": "x"}) == "x1!"


def test_all_mistakes_are_told_at_once():
    with pytest.raises(JobFileError) as caught:
        PromptTemplates(Prompt(system="{{ a", user="{% for %}"), Limits())
    assert "prompt.system: line 1" in str(caught.value)
    assert "prompt.user: line 1" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "values", "variable"),
    [
        ("{{ a.b }}!", {"a": {"b": None}}, "'b' is null"),
        ("{{ a['b'] }}!", {"a": {}}, "'b'"),
        ("{{ a | upper }}", {"a": None}, "'a' is null"),
        ("{{ a ~ '!' }}", {}, "'a' is missing"),
        ("{% for x in a %}{{ x }}{% endfor %}", {"a": None}, "'a' is null"),
        ("{% for x in a %}{{ x }}{% endfor %}", {"a": ["b", None]}, "null value"),
        ("{{ a | tojson }}", {"a": None}, "'a' is null"),
        ("{{ a | length }}", {"a": None}, "'a' is null"),
    ],
)
def test_null_never_reaches_the_text(source, values, variable):
    error = failure(source, **values)
    assert error.kind == "template_undefined"
    assert variable in error.message


@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), ["a"], {"a": 1}, b"bytes"])
def test_A16_no_repr_reaches_the_text(value):
    assert failure("{{ a }}!", a=value).kind == "not_text"


def test_numbers_and_json_are_text():
    assert render("{{ n }} {{ f }} {{ l | tojson }} {{ l | join(', ') }}", n=3, f=1.5, l=["<ü>"]) == '3 1.5 ["<ü>"] <ü>'


def test_text_stays_as_it_is():
    assert render("{{ a }}.\n", a=" \r\n x ") == " \r\n x .\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__['os'].mkdir('x') }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__.__mro__}'.format(a) }}",
        "{{ a.append('x') }}",
        "{% include '/etc/hostname' %}",
        "{% import 'x' as x %}",
        "{% extends 'x' %}",
        "{{ a",
        "{% if a %}",
        "{{ a | nosuchfilter }}",
    ],
)
def test_B08_forbidden_templates_stop_the_job(source):
    with pytest.raises(JobFileError, match=r"^prompt\.text: "):
        RowTemplate(source, "prompt.text", TemplateLimits())


BOMBS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'x' * 99999999999 }}",
    "{{ 99999999999 * [1] }}",
    "{% set ns = namespace(x='y') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='y') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='y') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{% set x = 'x' * 9999999 %}{% for i in range(99999) %}{% set y = x | replace('x', 'y') %}{% endfor %}",
    "{% set x = 'x' * 9999999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "{{ ([['x' * 1000] * 100000] * 10000) | tojson }}",
    "{{ ([['x' * 1000] * 100000] * 10000) | string }}",
    "{{ range(100000) | join('z' * 10000) }}",
    "{{ ('z' * 10000).join(range(100000) | map('string')) }}",
    "{{ 'x' | center(99999999999) }}",
    "{{ 'x' | indent(99999999999, true) }}",
    "{{ 'xxxx' | wordwrap(1, true, 'x' * 60000000) }}",
    "{{ 'xxxx' | replace('x', 'x' * 60000000) }}",
    "{{ 'xxxx'.replace('x', 'x' * 60000000) }}",
    "{{ 1111 | replace(1, 'x' * 60000000) }}",
    "{{ [1] | center(99999999999) }}",
    "{{ 'x'.ljust(99999999999) }}",
    "{{ '\t'.expandtabs(99999999999) }}",
    "{{ '%999999999999d' % 1 }}",
    "{{ '%*d' % (99999999999, 1) }}",
    "{{ '%999999999999d' | format(1) }}",
    "{{ '{:999999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 99999999999) }}",
    "{{ ('{0}' * 1000).format('x' * 1000000) }}",
    "{{ (1).to_bytes(99999999999, 'big') }}",
    "{{ ['x'] | batch(99999999999, 'y') | list }}",
    "{{ 'x' | slice(99999999999, 'y') | list }}",
    "{{ 1.5 | round(99999999999, 'ceil') }}",
    "{{ ('9' * 60000000) | int(16) }}",
    "{{ ('x' * 60000000) | batch(1) | list }}",
    "{{ ('x ' * 30000000).split() }}",
    "{{ ('x' * 60000000) | wordwrap(10) }}",
    "{{ ('<!---->' * 8000000) | striptags }}",
    "{{ (('<!---->' * 8000000) | safe).striptags() }}",
    "{{ 'a'.translate({97: 'x' * 60000000}) }}",
    "{{ (['x' * 60000000, 'x' * 60000000] * 100000) | sort }}",
    "{{ (['x' * 60000000] * 1000) | map('lower') | list }}",
    "{{ (['x'] * 1000) | map('center', 60000000) | list }}",
    "{% set x = 'x' * 60000000 %}{% set n = namespace(l=[]) %}"
    "{% for i in range(999) %}{% set n.l = n.l + [x[i:]] %}{% endfor %}",
    "{% set x = 'x' * 60000000 %}{% set n = namespace(l=[]) %}"
    "{% for i in range(999) %}{% set n.l = n.l + [x.upper()] %}{% endfor %}",
    "{% set x = range(99999) | list %}{% set n = namespace(l=[]) %}"
    "{% for i in range(9999) %}{% set n.l = n.l + [x.copy()] %}{% endfor %}",
    "{{ ('%9999999999d'.encode()) % 1 }}",
]

_RUN_BOMBS = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from batchgen.errors import JobFileError
from batchgen.prompts.budget import TemplateLimits
from batchgen.prompts.template import RowTemplate
stopped = []
for source in json.load(sys.stdin):
    try:
        RowTemplate(source, "prompt.text", TemplateLimits(seconds=0.5))
    except JobFileError as error:
        stopped.append("the template" in str(error))
    else:
        stopped.append(False)
print(json.dumps(stopped))
"""


def test_B08_bombs_are_stopped_within_two_gigabytes():
    done = subprocess.run(
        [sys.executable, "-c", _RUN_BOMBS], input=json.dumps(BOMBS), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    stopped = dict(zip(BOMBS, json.loads(done.stdout), strict=True))
    assert [source for source, is_stopped in stopped.items() if not is_stopped] == []


def test_B08_a_bomb_in_the_data_fails_its_row_alone():
    error = failure("{{ 'x' * n }}", n=10**12)
    assert error.kind == "template_error"
    assert "limits.template_chars" in error.message


def test_B08_the_step_count_is_deterministic():
    template = "{% for i in range(n) %}{% endfor %}"
    limits = TemplateLimits(seconds=0.1)
    assert render(template, limits, n=49_000) == ""
    with pytest.raises(RowFailure, match="50,000 steps"):
        render(template, limits, n=51_000)


def test_recursion_fails_its_row():
    assert failure("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").kind == "template_error"


def test_steps_are_not_carried_from_row_to_row():
    template = RowTemplate(
        "{% for i in range(30000) %}{% endfor %}{{ a }}!", "prompt.text", TemplateLimits(seconds=0.1)
    )
    assert [template.render({"a": "x"}) for _ in range(4)] == ["x!"] * 4
