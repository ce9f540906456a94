import io
import json
import logging
import os
import sys
import types
import unittest
from pathlib import Path

import pytest

from torch_testing_ext import pytest_plugin
from torch_testing_ext._pytest_ranks import pytest_internals as internals


@pytest.fixture
def value():
    return 3


@pytest.fixture
def later():
    return 4


@pytest.mark.parametrize("number", [1])
def test_fixtures(request, value, number, later):
    definitions = internals.fixture_definitions(request.node)
    assert [each.func.__name__ for each in definitions["value"]] == ["value"]
    assert internals.is_parameter(definitions["number"][0]) and not internals.is_parameter(definitions["value"][0])
    del request.node.funcargs["later"]
    internals.fill_fixtures(request.node)
    assert request.node.funcargs["later"] == 4
    assert internals.is_fixture(value_function()) == (pytest.version_tuple < (8, 4))


def test_fixtures_of_a_module():
    renamed = pytest.fixture(name="other")(lambda: 5)
    module = {"value": value, "test": test_fixtures, "renamed": renamed, "later": later}
    assert internals.fixtures_of(module) == ["value", "other", "later"]
    assert {"dist_env", "layout", "spawn"} <= {*internals.fixtures_of(vars(pytest_plugin))}


def value_function():
    @pytest.fixture
    def function(): ...

    return function


def test_added_fixtures(request):
    holder = types.ModuleType("added")
    holder.added = pytest.fixture(name="added")(lambda: 5)
    internals.add_fixtures(request.node.parent, holder)
    assert request.getfixturevalue("added") == 5


ended = []


def test_finalizers(request):
    internals.finalizers(request.node).append(lambda: ended.append("by a finalizer"))


def test_finalizers_were_called():
    assert ended == ["by a finalizer"]


class XunitTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls): ...

    @pytest.fixture(autouse=True)
    def keep(self, request):
        self.item = request.node

    def test_unittest(self):
        assert internals.is_of_unittest(self.item) and internals.kept_errors(self.item) == []
        names = list(internals.fixture_definitions(self.item))
        assert any(name.startswith(internals.UNITTEST_FIXTURE) for name in names)
        try:
            raise ValueError("kept")
        except ValueError:
            self.item.addError(self, sys.exc_info())
        assert [str(error) for error in internals.kept_errors(self.item)] == ["kept"]
        self.item._excinfo.clear()
        self.item._explicit_tearDown = "postponed"
        assert internals.postponed_tear_down(self.item) == "postponed"
        self.item._explicit_tearDown = None


class TestXunit:
    def setup_method(self): ...

    def test_of_pytest(self, request):
        assert not internals.is_of_unittest(request.node) and internals.kept_errors(request.node) == []
        assert internals.argument_names(request.node)[:1] == ("request",)
        assert internals.postponed_tear_down(request.node) is None
        assert any(name.startswith(internals.XUNIT_FIXTURES) for name in internals.fixture_definitions(request.node))


def test_options():
    known = internals.known_options()
    assert {"-k", "--tb", "--basetemp", "--sanitize"} <= known.keys() and "--nosuch" not in known
    assert known["--tb"] and known["-p"] and not known["--setup-show"] and not known["-v"]
    config = internals.make_config(["-q", "-m", "not slow", "--tb=short", __file__], [])
    assert internals.options_again(config) == ["-m", "not slow"]
    internals.unconfigure(config)


def test_xfail(request):
    assert not internals.is_marked_xfail(request.node)
    request.applymarker(pytest.mark.xfail(reason="added"))
    internals.read_xfail_marks(request.node)
    assert internals.is_marked_xfail(request.node)
    assert False


def test_reports(request):
    raise internals.skip_at_test("at the test")


def fails():
    assert value is None


def test_texts(request):
    report = pytest.TestReport.from_item_and_call(request.node, pytest.CallInfo.from_call(fails, "call"))
    text = internals.text_of(report)
    assert text.startswith("    def fails") and text.strip() == report.longreprtext
    report.longrepr = internals.plain_text("the text", "path.py", 3, "the summary")
    assert report.longreprtext.startswith("the text") and report.longrepr.reprcrash.message == "the summary"


def test_property_of_the_run(pytestconfig):
    internals.add_property(pytestconfig, "name", "value")  # no JUnit file is written, so there is nothing to add it to
    written = types.SimpleNamespace(add_global_property=lambda *named: properties.append(named))
    properties = []
    pytestconfig.stash[internals.xml_key] = written
    internals.add_property(pytestconfig, "name", "value")
    del pytestconfig.stash[internals.xml_key]
    assert properties == [("name", "value")]


def test_colours(request, monkeypatch):
    report = pytest.TestReport.from_item_and_call(request.node, pytest.CallInfo.from_call(fails, "call"))
    told = "title\n  Expected: 1\n  Got:      2\n\nrun again:  this"
    report.longrepr = internals.plain_text(told, "path.py", 3, "the summary")
    report.line_styles = ["bold", "green", "red", "", "light"]
    sent = report._to_json()
    internals.colour(report)
    assert report._to_json() == sent and internals.text_of(report) == told
    writer = internals.TerminalWriter(internals.io.StringIO())
    writer.hasmarkup = True
    report.toterminal(writer)
    lines = writer._file.getvalue().splitlines()
    assert lines[:3] == ["\x1b[1mtitle\x1b[0m", "\x1b[32m  Expected: 1\x1b[0m", "\x1b[31m  Got:      2\x1b[0m"]


def test_failure_text(request):
    """The frame of a library is one line of its source."""
    try:
        json.loads("[")
    except ValueError as error:
        text = internals.failure_text(request.node, error)
    assert '>           json.loads("[")' in text.splitlines(), "the whole function of the project"
    assert "def raw_decode(" not in text
    assert "json.decoder.JSONDecodeError: Expecting value" in text
    assert text.splitlines().count('    raise JSONDecodeError("Expecting value", s, err.value) from None') == 1


def test_settings(request):
    unknown, known = internals.settings(request.config)
    assert "no_such" not in known and "testpaths" in known and "no_such" not in unknown


def test_debugger(request, monkeypatch):
    monkeypatch.setattr("pdb.Pdb.interaction", lambda *_: None)
    excinfo = call = None
    try:
        1 / 0
    except ZeroDivisionError as error:
        excinfo = internals.exception_info(error)
    call = pytest.CallInfo.from_call(lambda: 1 / 0, "call")
    internals.enter_debugger(request.node, excinfo, pytest.TestReport.from_item_and_call(request.node, call))


def test_output(request, tmp_path):
    assert tmp_path.is_relative_to(internals.temporary_base(request.config))
    manager = internals.capture_manager(request.config)
    assert manager.is_globally_capturing()
    print("captured")
    assert "captured" in manager.read_global_capture()[0]
    of_terminal, of_report = internals.log_handlers(request.config)
    of_report.setStream(stream := io.StringIO())
    logging.error("logged")
    assert "logged" in stream.getvalue()
    internals.remove_log_handler(of_terminal)
    assert of_terminal not in logging.getLogger().handlers
    with internals.logging_to(logging.StreamHandler(stream)):
        logging.error("logged twice")
    assert stream.getvalue().count("logged twice") == 2
    internals.begin_caplog(request.node, request.node)
    assert request.getfixturevalue("caplog").messages == []
    assert internals.live_log(request.config) is internals.live_terminal(request.config) is None
    request.config.option.setupshow = True
    os.close(internals.live_terminal(request.config))
    request.config.option.setupshow = False
    request.config.option.log_cli_level = "WARNING"
    assert internals.live_log(request.config)[1] is not None
    request.config.option.log_cli_level = None
    for name in [internals.TERMINAL]:
        assert request.config.pluginmanager.get_plugin(name) is not None
    if (pid := os.fork()) == 0:
        internals.forget_captured(request.config)
        os._exit("_global_capturing=None" not in repr(manager))
    assert os.waitpid(pid, 0)[1] == 0


def test_shared_set_up(request):
    session = request.session
    other = next(item for item in session.items if "value" in item.fixturenames)
    if (pid := os.fork()) == 0:
        try:
            assert internals.take_finalizers(request.node) and not internals.take_finalizers(request.node)
            internals.take_over(session, "module", ("value",))
            assert internals.fixture_definitions(other)["value"][0].scope == "module"
            internals.set_up_in_session(other)
            assert other.funcargs["value"] == 3 and internals.finalizers(other)
            internals.tear_down_session(session)
            assert not internals.take_finalizers(other)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_sessions(tmp_path):
    words = ["--capture=no", "-c", os.devnull, f"--rootdir={tmp_path}", "--pdb", "--trace", "--lf"]
    words += ["--nf", "--sw"]
    config = internals.make_config([*words, str(tmp_path)], [])
    for name in (internals.DEBUGGER, internals.TRACE, internals.TERMINAL, *internals.REMEMBERING):
        assert config.pluginmanager.get_plugin(name) is not None, name
    internals.redirect_terminal(config, stream := io.StringIO()).write_line("written")
    assert "written" in stream.getvalue()
    path = tmp_path / "test_of_session.py"
    path.write_text("def test_a(): ...")
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    module = pytest.Module.from_parent(session, path=path)
    assert internals.imported_module(module) is None
    assert module.obj is internals.imported_module(module)

    class Noting:
        def pytest_sessionfinish(self, exitstatus):
            finished.append(int(exitstatus))

    finished, session.exitstatus = [], pytest.ExitCode.TESTS_FAILED
    config.pluginmanager.register(Noting())
    internals.finish_without_tear_down(session)
    assert finished == [1]
    assert config.pluginmanager.get_plugin("runner") is not None
    internals.unconfigure(config)
    Path(tmp_path, "conftest.py").write_text("1 / 0")
    with pytest.raises(Exception) as raised:
        internals.make_config([*words, str(tmp_path)], [])
    file, cause = internals.failed_conftest(raised.value)
    assert (file.name, type(cause)) == ("conftest.py", ZeroDivisionError)
    assert internals.failed_conftest(ValueError()) is None


def test_odd_folders(tmp_path):
    path = tmp_path / "[a::b]" / "test_[x].py"
    path.parent.mkdir()
    path.write_text("class TestA:\n    def test_a(self): ...\n    def test_b(self): ...\n")
    words = ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}"]
    with internals.whole_paths():
        config = internals.make_config([*words, f"{path}::TestA::test_b"], [])
        session = pytest.Session.from_config(config)
        config.hook.pytest_sessionstart(session=session)
        session.perform_collect()
    (item,) = session.items
    assert internals.name_in_file(item) == "TestA::test_b"
    collectors = [collector for collector in item.listchain() if internals.is_file(collector)]
    assert [collector.path for collector in collectors] == [path]
    internals.unconfigure(config)


def test_ways_to_a_file(tmp_path):
    package, beside = tmp_path / "package", tmp_path / "beside"
    for folder in (package, beside):
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "test_x.py").write_text("def test_x(): ...")
    looked_at = []

    class Narrowed:
        def pytest_ignore_collect(self, collection_path):
            looked_at.append(collection_path)
            return None if internals.leads_to(collection_path, package / "test_x.py") else True

    words = ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}"]
    config = internals.make_config([*words, str(tmp_path)], [Narrowed()])
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    session.perform_collect()
    assert [item.path for item in session.items] == [package / "test_x.py"]
    assert any(beside in (path, *path.parents) for path in looked_at)
    (collector,) = [each for each in session.items[0].listchain() if internals.is_file(each)]
    assert collector.path == package / "test_x.py"
    internals.unconfigure(config)
