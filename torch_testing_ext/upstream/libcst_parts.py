"""The parts of libcst that rewriting and converting use. Without libcst, importing this module raises a UserError."""

from torch_testing_ext._process import user_commands

from .mapping import UserError

try:
    import libcst as libcst
    from libcst.codemod import CodemodContext as CodemodContext
    from libcst.codemod.visitors import AddImportsVisitor as AddImportsVisitor
    from libcst.helpers import get_full_name_for_node as get_full_name_for_node
    from libcst.metadata import (
        ByteSpanPositionProvider as ByteSpanPositionProvider,
        CodeSpan as CodeSpan,
        MetadataWrapper as MetadataWrapper,
        PositionProvider as PositionProvider,
        QualifiedNameProvider as QualifiedNameProvider,
    )
except ImportError as error:
    raise UserError(f"this command needs libcst: {user_commands.install('upstream')} ({error})") from None
