"""Products in blocks of fixed sizes, and how those sizes are found."""

import pytest
import torch

from batchgen.errors import EngineError
from batchgen.models import invariant
from batchgen.models.linear import Linear, NewParameter


@pytest.fixture
def linear(request):
    torch.manual_seed(0)
    layer = Linear(NewParameter(torch.device("cpu"), torch.float32), 24, 10, bias=request.param)
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


@pytest.mark.parametrize("linear", [False, True], indirect=True)
@pytest.mark.parametrize("rows", [0, 1, 4, 5, 9, 12, 13, 31])
def test_blocks_of_fixed_sizes_give_the_same_product(linear, rows):
    x = torch.randn(rows, 24)
    expected = linear(x)
    linear.fix_sizes((4, 9))
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("linear", [False, True], indirect=True)
def test_only_the_fixed_sizes_are_multiplied(linear, monkeypatch):
    seen = []
    multiply = linear._multiply
    monkeypatch.setattr(linear, "_multiply", lambda x, out: (seen.append(len(x)), multiply(x, out)))
    linear.fix_sizes((4, 9))
    linear(torch.randn(22, 24))
    assert seen == [9, 9, 4]


class Moody(Linear):
    """Gives something else for 3 and 5 rows, and for the first one of 7."""

    def _multiply(self, x, out):
        super()._multiply(x, out)
        if len(x) in (3, 5):
            out += 0.5
        if len(x) == 7:
            out[0] += 0.5


@pytest.fixture
def moody():
    torch.manual_seed(0)
    layer = Moody(NewParameter(torch.device("cpu"), torch.float32), 24, 10)
    layer.weight.random_(-9, 10)  # whole numbers: their sums are exact in any order
    return layer


def test_sizes_that_give_a_row_other_bits_are_left_out(moody):
    x = torch.randint(-9, 10, (8, 24)).float()
    assert invariant.agreeing_sizes(moody, x, (2, 3, 4, 5, 7, 8)) == [2, 4, 8]
    invariant.make_batch_invariant([moody], (2, 3, 4, 5, 7, 8))
    whole = moody(x)
    assert all(torch.equal(moody(x[:rows]), whole[:rows]) for rows in range(1, 9))


def test_a_product_in_which_a_rows_place_matters_is_an_error(moody):
    with pytest.raises(EngineError, match="a product of 24 by 10 depends on where"):
        invariant.make_batch_invariant([moody], (2, 7))
