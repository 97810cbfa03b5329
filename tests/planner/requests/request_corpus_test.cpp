// tests/e2e/hostile_requests.json, without the pipeline around it: what each file's lines become.
// Lines that would be answered get an answer of one token, so that result lines are checked too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <map>

#include "common/files/json_file.h"
#include "planner/requests/request_file.h"
#include "planner/results/choices.h"
#include "planner/results/result_line.h"
#include "tests/planner/requests/request_support.h"
#include "tests/support/source_folder.h"

namespace poise {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;
using testing_support::complaint;
using testing_support::ScratchDirectory;

constexpr std::int32_t kCorpusContext = 64;

const json& corpus() {
  static const json read = read_json_file(source_folder() / "tests/e2e/hostile_requests.json");
  return read["cases"];
}

void replace_all(std::string& text, std::string_view name, const std::string& value) {
  for (auto at = text.find(name); at != std::string::npos; at = text.find(name, at)) {
    text.replace(at, name.size(), value);
  }
}

std::string content(const json& pieces) {
  std::string out;
  for (const json& piece : pieces) {
    if (piece.is_string()) {
      std::string text = piece.get<std::string>();
      replace_all(text, "@vocab@", std::to_string(testing_support::kRows));
      out += text;
    } else if (piece.contains("hex")) {
      const auto hex = piece["hex"].get<std::string>();
      for (std::size_t i = 0; i < hex.size(); i += 2) {
        out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
      }
    } else {
      const json& times = piece["times"];
      const auto count = times.is_array() ? kCorpusContext + times[1].get<int>() : times.get<int>();
      std::string many = content(piece["of"]);
      const std::size_t size = many.size() * static_cast<std::size_t>(count);
      while (many.size() < size) {  // not piece by piece: some cases have a hundred million
        many += many;
      }
      out.append(many, 0, size);
    }
  }
  return out;
}

// Makes the case's input in `scratch`.
fs::path input_of(const json& hostile, const ScratchDirectory& scratch) {
  const fs::path path = scratch / "in.jsonl";
  const std::string kind = hostile.value("kind", "");
  if (hostile.contains("file")) {
    return scratch.write("in.jsonl", content(hostile["file"]));
  }
  if (kind == "null_device") {
    return "/dev/null";
  }
  if (kind == "directory") {
    fs::create_directory(path);
  } else if (kind == "pipe") {
    EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
  } else if (kind == "loop" || kind == "broken_link") {
    fs::create_symlink(kind == "loop" ? "in.jsonl" : "nowhere", path);
  } else if (kind == "socket") {
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    path.string().copy(address.sun_path, sizeof address.sun_path - 1);
    const int descriptor = ::socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT_EQ(::bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    ::close(descriptor);
  } else {
    EXPECT_EQ(kind, "missing");
  }
  return path;
}

// The result line of every input line, by its number.
std::map<std::uint32_t, json> results_of(const RequestFile& file, const Tokenizer& tokenizer) {
  std::map<std::uint32_t, json> results;
  const std::vector<TokenId> eos{testing_support::kEos};
  Choices choices;
  for (const RequestError& error : file.errors) {
    results[error.line.n] = json::parse(error_line(error));
  }
  for (const Request& request : file.requests) {
    Answer answer(request, &tokenizer, eos);
    answer.push(testing_support::kEos, {});
    if (const auto line = choices.add(request, answer, eos, "m", 0)) {
      results[line->request.n] = json::parse(line->text);
    }
  }
  EXPECT_EQ(results.size(), file.lines());
  return results;
}

// [code or "ok", param] of a result line.
std::pair<std::string, std::string> outcome(const json& line) {
  const json& body = line["response"]["body"];
  if (line["response"]["status_code"] == 200) {
    return {"ok", ""};
  }
  EXPECT_EQ(line["response"]["status_code"], 400);
  EXPECT_TRUE(body["error"]["message"].is_string());
  EXPECT_EQ(body["error"]["type"], "invalid_request_error");
  return {body["error"]["code"], body["error"]["param"].is_null() ? "" : body["error"]["param"]};
}

std::string text_at(const json& list, std::size_t at) {
  return at < list.size() ? list[at].get<std::string>() : "";
}

class HostileRequests : public ::testing::TestWithParam<std::size_t> {};

TEST_P(HostileRequests, BecomeWhatTheCorpusSays) {
  const json& hostile = corpus()[GetParam()];
  const Tokenizer tokenizer = testing_support::byte_tokenizer();
  const RequestRules rules{kCorpusContext, testing_support::kRows, &tokenizer, 0};
  const ScratchDirectory scratch;
  const fs::path input = input_of(hostile, scratch);
  if (hostile.contains("refused")) {
    const auto said = complaint([&] { read_requests(input, rules, 2); });
    EXPECT_EQ(said.code, Exit::cannot_start);
    EXPECT_THAT(said.sentence, HasSubstr(hostile["refused"].get<std::string>()));
    EXPECT_EQ(said.sentence.find('\n'), std::string::npos);
    return;
  }
  auto results = results_of(read_requests(input, rules, 2), tokenizer);
  for (const json& expected : hostile["lines"]) {
    const auto number = expected[0].get<std::uint32_t>();
    ASSERT_TRUE(results.contains(number)) << expected;
    const json& line = results[number];
    EXPECT_EQ(line["custom_id"], expected[1]);
    // The supervisor renders chat lines and finds that a model has no template. This test renders none.
    const bool chat = text_at(expected, 2) == "no_chat_template";
    const std::string code = chat ? "invalid_value" : text_at(expected, 2);
    EXPECT_EQ(outcome(line), std::pair(code, text_at(expected, 3))) << line;
    results.erase(number);
  }
  const json others = hostile.value("others", json::array({0}));
  EXPECT_EQ(results.size(), others[0].get<std::size_t>());
  for (const auto& [number, line] : results) {
    ASSERT_EQ(outcome(line), std::pair(text_at(others, 1), text_at(others, 2))) << number;
  }
}

INSTANTIATE_TEST_SUITE_P(Corpus, HostileRequests, ::testing::Range<std::size_t>(0, corpus().size()),
                         [](const auto& info) {
                           return corpus()[info.param]["name"].template get<std::string>();
                         });

}  // namespace
}  // namespace poise
