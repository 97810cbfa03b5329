#include "planner/requests/request_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "common/files/sha256.h"
#include "tests/planner/requests/request_support.h"

namespace poise {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing_support::line_with;
using testing_support::ScratchDirectory;

class RequestFileTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { tokenizer_ = new Tokenizer(testing_support::byte_tokenizer()); }
  static void TearDownTestSuite() { delete tokenizer_; }

  static RequestFile read(const std::string& content, int threads = 2) {
    const ScratchDirectory scratch;
    return read_requests(scratch.write("in.jsonl", content),
                         {64, testing_support::kRows, tokenizer_, 0}, threads);
  }
  static Tokenizer* tokenizer_;
};
Tokenizer* RequestFileTest::tokenizer_ = nullptr;

TEST_F(RequestFileTest, ChatLinesAreReadWithTheirRenderedPrompts) {
  const ScratchDirectory scratch;
  const std::string input = testing_support::chat_line_with("{}", "a") + "\n\n" +
                            line_with(R"({"prompt":"x"})", "b") + "\nnonsense\n" +
                            testing_support::chat_line_with("{}", "c") + "\n" +
                            testing_support::chat_line_with("{}", "d") + "\n";
  const auto path = scratch.write("in.jsonl", input);
  const std::string digest = read(input).digest;
  const auto prompts = [&](const std::string& entries) {
    return scratch.write("chat.jsonl", R"({"version": 1, "input": ")" + digest + "\"}\n" + entries);
  };
  const auto read_with = [&](const std::filesystem::path& rendered) {
    return read_requests(path, {64, testing_support::kRows, tokenizer_, 0}, 2, rendered);
  };
  // Entries of lines that are no chat lines to the planner are passed over.
  const RequestFile file = read_with(
      prompts("{\"line\": 1, \"prompt\": \"xx\"}\n{\"line\": 4, \"prompt\": \"y\"}\n"
              "{\"line\": 5, \"error\": \"no\", \"param\": \"messages\", \"code\": \"c\"}\n"));
  ASSERT_EQ(file.requests.size(), 2u);
  EXPECT_EQ(file.requests[0].prompt.size(), 2u);
  ASSERT_EQ(file.errors.size(), 3u);
  EXPECT_EQ(file.errors[1].message, "no");
  EXPECT_EQ(file.errors[2].param, "url") << "line 6 has no entry";

  EXPECT_THAT(testing_support::complaint([&] { read_with(prompts("{\"lime\": 1}\n")); }).sentence,
              HasSubstr("is damaged at line 2"));
  scratch.write("chat.jsonl", "{\"version\": 1, \"input\": \"another\"}\n");
  EXPECT_THAT(
      testing_support::complaint([&] { read_with(scratch.path() / "chat.jsonl"); }).sentence,
      HasSubstr("prompts of another input"));
}

TEST_F(RequestFileTest, EveryLineThatIsNotBlankHasOneOutcome) {
  const RequestFile file =
      read(line_with(R"({"prompt":"x"})", "a") + "\n\nnonsense\n" +
           line_with(R"({"prompt":5})", "b") + "\r\n \n" + line_with(R"({"prompt":[5]})", "c"));
  ASSERT_EQ(file.requests.size(), 2u);
  EXPECT_EQ(file.requests[0].id, RequestId{1});
  EXPECT_EQ(file.requests[1].id, RequestId{6});
  EXPECT_EQ(file.requests[1].custom_id, "c");
  ASSERT_EQ(file.errors.size(), 2u);
  EXPECT_EQ(file.errors[0].line, RequestId{3});
  EXPECT_THAT(file.errors[0].message, HasSubstr("line 3"));
  EXPECT_EQ(file.errors[1].line, RequestId{4});
  EXPECT_EQ(file.lines(), 4u);
  EXPECT_THAT(file.line_numbers(),
              ElementsAre(RequestId{1}, RequestId{3}, RequestId{4}, RequestId{6}));
}

TEST_F(RequestFileTest, ALineThatWantsSeveralAnswersBecomesARequestForEach) {
  const RequestFile file = read(line_with(R"({"prompt":"x","n":3,"seed":7})", "a") + "\n" +
                                line_with(R"({"prompt":"y"})", "b") + "\n" +
                                line_with(R"({"prompt":"z","n":2})", "c") + "\n");
  EXPECT_EQ(file.lines(), 3u);
  EXPECT_EQ(file.line_numbers(), (std::vector<RequestId>{{1}, {2}, {3}}));
  ASSERT_EQ(file.requests.size(), 6u);
  for (const std::size_t i : {0u, 1u, 2u}) {
    const Request& one = file.requests[i];
    EXPECT_EQ(one.line().n, 1u);
    EXPECT_EQ(one.choice, static_cast<std::int32_t>(i));
    EXPECT_EQ(one.choices, 3);
    EXPECT_EQ(one.sampling.seed, 7u + i);
    EXPECT_EQ(one.prompt, file.requests[0].prompt);
  }
  EXPECT_EQ(file.requests[3].id.n, 2u);
  EXPECT_EQ(file.requests[4].id.n, 3u);
  EXPECT_EQ(file.requests[5].sampling.seed, file.requests[4].sampling.seed + 1);
  // Ids are one another's and no line's.
  EXPECT_EQ(file.requests[1].id.n, kFirstFurtherChoice);
  EXPECT_EQ(file.requests[2].id.n, kFirstFurtherChoice + 1);
  EXPECT_EQ(file.requests[5].id.n, kFirstFurtherChoice + 2);
}

TEST_F(RequestFileTest, AnEmptyFileHasNoLines) {
  EXPECT_EQ(read("").lines(), 0u);
  EXPECT_EQ(read("\n\n").lines(), 0u);
}

TEST_F(RequestFileTest, TheFirstOfDuplicatesRuns) {
  const std::string line = line_with(R"({"prompt":"x"})", "same");
  const RequestFile file = read(line + "\n" + line + "\n" + line + "\n");
  ASSERT_EQ(file.requests.size(), 1u);
  EXPECT_EQ(file.requests[0].id, RequestId{1});
  ASSERT_EQ(file.errors.size(), 2u);
  for (const RequestError& error : file.errors) {
    EXPECT_EQ(error.code, "duplicate_custom_id");
    EXPECT_EQ(error.param, "custom_id");
    EXPECT_EQ(error.custom_id, "same");
    EXPECT_THAT(error.message, HasSubstr("line 1"));
  }
}

TEST_F(RequestFileTest, ALineInErrorKeepsItsCustomId) {
  const RequestFile file =
      read(line_with(R"({"prompt":5})", "same") + "\n" + line_with(R"({"prompt":"x"})", "same"));
  EXPECT_TRUE(file.requests.empty());
  ASSERT_EQ(file.errors.size(), 2u);
  EXPECT_EQ(file.errors[0].param, "prompt");
  EXPECT_EQ(file.errors[1].code, "duplicate_custom_id");
}

TEST_F(RequestFileTest, MissingAndEmptyCustomIdsAreNotDuplicatesOfEachOther) {
  const std::string missing = R"({"method":"POST","url":"/v1/completions","body":{"prompt":"x"}})";
  const RequestFile file =
      read(missing + "\n" + missing + "\n" + line_with("{}", "") + "\n" + line_with("{}", ""));
  ASSERT_EQ(file.errors.size(), 4u);
  for (const RequestError& error : file.errors) {
    EXPECT_EQ(error.param, "custom_id");
    EXPECT_NE(error.code, "duplicate_custom_id");
  }
}

TEST_F(RequestFileTest, ALineTooLongIsAnErrorAndTheRestRuns) {
  const std::string huge(static_cast<std::size_t>(kMiB.n) * 64 + 1, 'x');
  const RequestFile file = read(line_with(R"({"prompt":"x"})", "a") + "\n" + huge + "\n" +
                                line_with(R"({"prompt":"x"})", "b") + "\n");
  EXPECT_EQ(file.requests.size(), 2u);
  ASSERT_EQ(file.errors.size(), 1u);
  EXPECT_EQ(file.errors[0].code, "line_too_long");
  EXPECT_THAT(file.errors[0].message, HasSubstr("line 2: longer than 64 MiB"));
}

TEST_F(RequestFileTest, LinesOfManyMebibytesAreRead) {
  const std::string text(20 << 20, 'x');
  const RequestFile file = read(line_with(fmt::format(R"({{"prompt":"y","user":"{}"}})", text)));
  ASSERT_EQ(file.requests.size(), 1u);
  EXPECT_EQ(file.requests[0].prompt.size(), 2u);
}

TEST_F(RequestFileTest, TheDigestIsOfTheFilesBytes) {
  const std::string content = "\xef\xbb\xbf" + line_with(R"({"prompt":"x"})") + "\r\n\n";
  EXPECT_EQ(read(content).digest,
            to_hex(sha256(std::as_bytes(std::span(content.data(), content.size())))));
  EXPECT_NE(read(content).digest, read(content + "\n").digest);
}

TEST_F(RequestFileTest, TheOutcomeDoesNotDependOnThreads) {
  const auto seed = static_cast<unsigned>(::testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  const std::vector<std::string> bodies{R"({"prompt":"abc abc"})", R"({"prompt":[5,6,7]})",
                                        R"({"prompt":5})", "nonsense",
                                        R"({"prompt":"x","top_p":3})"};
  std::string content;
  for (int i = 0; i < 5000; ++i) {
    content += line_with(bodies[random() % bodies.size()], std::to_string(random() % 4000));
    content += random() % 10 == 0 ? "\n\n" : "\n";
  }
  const RequestFile one = read(content, 1), four = read(content, 4);
  ASSERT_EQ(one.requests.size(), four.requests.size());
  ASSERT_EQ(one.errors.size(), four.errors.size());
  EXPECT_EQ(one.lines(), 5000u);
  for (std::size_t i = 0; i < one.requests.size(); ++i) {
    EXPECT_EQ(one.requests[i].id, four.requests[i].id);
    EXPECT_EQ(one.requests[i].prompt, four.requests[i].prompt);
    EXPECT_EQ(one.requests[i].sampling.seed, four.requests[i].sampling.seed);
  }
  for (std::size_t i = 0; i < one.errors.size(); ++i) {
    EXPECT_EQ(one.errors[i].line, four.errors[i].line);
    EXPECT_EQ(one.errors[i].message, four.errors[i].message);
  }
}

}  // namespace
}  // namespace poise
