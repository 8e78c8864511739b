"""copy_pages: copy KV pages in every layer, for a sequence that forks inside a page."""

from collections.abc import Sequence

from torch import Tensor


def copy_pages(k_pages: Sequence[Tensor], v_pages: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy page src[i] onto page dst[i] in all layers. src and dst are int64 [N]; no page may be in both."""
    for pages in (*k_pages, *v_pages):
        pages.index_copy_(0, dst, pages.index_select(0, src))
