import pytest

from pipeline.wire.codec import generate


def test_generated_files_match_the_proto_file():
    pytest.importorskip("grpc_tools")
    for name, text in generate.generated_files().items():
        assert (generate.GENERATED / name).read_text() == text
