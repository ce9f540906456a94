"""The same training under every layout: tensor, data, pipeline, context and expert parallel must train alike."""

from torch_testing_ext.layouts.layout_checks import (
    check_layouts as check_layouts,
    layouts as layouts,
)
from torch_testing_ext.layouts.layout_failures import LayoutError as LayoutError
from torch_testing_ext.layouts.layout_findings import LayoutReport as LayoutReport
from torch_testing_ext.layouts.layout_of_rank import Layout as Layout
from torch_testing_ext.layouts.layout_options import LayoutOptions as LayoutOptions
from torch_testing_ext.layouts.uneven_tokens import tokens as tokens
