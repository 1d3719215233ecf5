import generate_messages
import pytest


def test_generated_files_match_the_proto_file():
    pytest.importorskip("grpc_tools")
    for name, text in generate_messages.generated_files().items():
        assert (generate_messages.GENERATED / name).read_text() == text
