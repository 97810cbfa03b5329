#include "planner/requests/request_sizes.h"

#include <gtest/gtest.h>

#include <random>

#include "planner/requests/request_file.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using testing_support::TempDirectory;

// Lines as people and programs write them, plain and less plain, good and bad.
std::string some_lines(int count) {
  std::mt19937 random(11);
  std::string text;
  for (int i = 0; i < count; ++i) {
    std::string ids;
    const auto length = 1 + random() % 40;
    for (unsigned j = 0; j < length; ++j) {
      ids += (j > 0 ? (random() % 2 == 0 ? ", " : ",") : "") + std::to_string(random() % 90);
    }
    const std::string prompt = random() % 9 == 0 ? "[[" + ids + "]]" : "[" + ids + "]";
    std::string body = "\"prompt\": " + prompt;
    if (random() % 5 != 0) {
      const std::string limit = "\"max_tokens\":" + std::to_string(random() % 30);
      body = random() % 2 == 0 ? body + ", " + limit : limit + " , " + body;
    }
    if (random() % 13 == 0) {
      body += R"(, "score_from": 1)";
    }
    if (random() % 7 == 0) {
      body += R"(, "user": "\"prompt\": [1]")";
    }
    text += "{\"custom_id\": \"" + std::to_string(i) +
            R"(", "method": "POST", "url": "/v1/completions", "body": {)" + body + "}}\n";
    text += random() % 11 == 0 ? "no JSON\n\n" : "";
  }
  return text;
}

TEST(RequestSizes, AreThoseThatARunReads) {
  const TempDirectory folder;
  const auto path = folder.path() / "in.jsonl";
  testing_support::write_file(path, some_lines(3000));
  const RequestRules rules{.context = 48, .vocab_size = 100};
  const RequestFile read = read_requests(path, rules);
  const RequestSizes sizes = read_request_sizes(path, rules);
  EXPECT_FALSE(sizes.estimated);
  EXPECT_EQ(sizes.refused, std::ssize(read.errors));
  ASSERT_EQ(sizes.requests.size(), read.requests.size());
  for (std::size_t i = 0; i < read.requests.size(); ++i) {
    EXPECT_EQ(sizes.requests[i].id, read.requests[i].id);
    EXPECT_EQ(sizes.requests[i].prompt, std::ssize(read.requests[i].prompt));
    EXPECT_EQ(sizes.requests[i].answer, read.requests[i].sampling.max_tokens);
    EXPECT_EQ(sizes.requests[i].most_context(), read.requests[i].most_context());
  }
}

TEST(RequestSizes, TheFirstRefusalIsToldWithItsLineOnce) {
  const TempDirectory folder;
  const auto path = folder.path() / "in.jsonl";
  const RequestRules rules{.context = 48, .vocab_size = 100};
  testing_support::write_file(path, "\n{}\nno JSON\n");
  EXPECT_EQ(read_request_sizes(path, rules).first_refusal, "line 2: \"custom_id\" is missing");
  testing_support::write_file(
      path, R"({"custom_id":"a","method":"PUT","url":"/v1/completions","body":{"prompt":[1]}})");
  EXPECT_EQ(read_request_sizes(path, rules).first_refusal,
            "line 1: \"method\" must be \"POST\", not \"PUT\"");
}

}  // namespace
}  // namespace poise
