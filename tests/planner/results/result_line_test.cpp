#include "planner/results/result_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <charconv>
#include <limits>
#include <random>

#include "planner/results/result_json.h"
#include "tests/planner/requests/request_support.h"

namespace poise {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using testing_support::complaint;

std::string json_text(std::string_view text) {
  std::string out;
  append_json_text(out, text);
  return out;
}

std::string json_logprob(float value) {
  std::string out;
  append_json_logprob(out, value);
  return out;
}

TEST(ResultJson, TextIsEscaped) {
  EXPECT_EQ(json_text(""), "\"\"");
  EXPECT_EQ(json_text("a\"b\\c/d"), R"("a\"b\\c/d")");
  EXPECT_EQ(json_text("\n\r\t\b\x7f"), R"("\n\r\t\u0008\u007f")");
  EXPECT_EQ(json_text(std::string_view("a\0b", 3)), R"("a\u0000b")");
  EXPECT_EQ(json_text("é漢😀"), "\"é漢😀\"");
}

TEST(ResultJson, NothingBreaksALineForAnyReader) {
  EXPECT_EQ(json_text("\u0085\u2028\u2029\x0b\x0c\x1c"),
            R"("\u0085\u2028\u2029\u000b\u000c\u001c")");
}

TEST(ResultJson, WhatIsNotUtf8IsReplaced) {
  EXPECT_EQ(json_text("a\xff"), "\"a\ufffd\"");
  EXPECT_EQ(json_text("\xe2\x82"), "\"\ufffd\"");
  EXPECT_EQ(json_text("\xed\xa0\x80x"), "\"\ufffd\ufffd\ufffdx\"");
}

TEST(ResultJson, AnyBytesGiveJsonThatReadsBack) {
  const auto seed = static_cast<unsigned>(::testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 20000; ++round) {
    std::string soup;
    for (unsigned i = random() % 20; i > 0; --i) {
      soup += static_cast<char>(random() % 4 == 0 ? random() % 128 : random() % 256);
    }
    const std::string text = json_text(soup);
    EXPECT_EQ(text.find('\n'), std::string::npos);
    const json parsed = json::parse(text);
    // Once replaced, nothing changes any more.
    EXPECT_EQ(json_text(parsed.get<std::string>()), text);
  }
}

TEST(ResultJson, LogprobsReadBackToTheSameFloat) {
  EXPECT_EQ(json_logprob(0), "0.0");
  EXPECT_EQ(json_logprob(-1), "-1.0");
  EXPECT_EQ(json_logprob(-0.1f), "-0.1");
  EXPECT_EQ(json_logprob(-1e-10f), "-1e-10");
  EXPECT_EQ(json_logprob(-std::numeric_limits<float>::infinity()), "-9999.0");
  EXPECT_EQ(json_logprob(-1e20f), "-9999.0");
  EXPECT_THROW(json_logprob(std::numeric_limits<float>::quiet_NaN()), Defect);
  const auto seed = static_cast<unsigned>(::testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 100000; ++round) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()) | 0x80000000u);
    if (!(value >= -9999)) {
      continue;
    }
    const std::string text = json_logprob(value);
    EXPECT_EQ(static_cast<float>(json::parse(text).get<double>()), value) << text;
    EXPECT_TRUE(json::parse(text).is_number_float()) << text;
  }
}

TEST(ResultLine, AnErrorStandsWhereClientsLook) {
  const json line =
      json::parse(error_line({{3}, "b", "it \"is\" wrong", "top_p", "invalid_value"}));
  EXPECT_EQ(line, json::parse(R"({"id":"poise-3","custom_id":"b","response":{"status_code":400,
      "request_id":"req-3","body":{"error":{"message":"it \"is\" wrong",
      "type":"invalid_request_error","param":"top_p","code":"invalid_value"}}},"error":null})"));
}

TEST(ResultLine, WhatIsNotKnownIsNull) {
  const json line = json::parse(error_line({{3}, std::nullopt, "x", "", "invalid_json"}));
  EXPECT_EQ(line["custom_id"], nullptr);
  EXPECT_EQ(line["response"]["body"]["error"]["param"], nullptr);
}

TEST(ResultLine, EveryLineReadsBackToItsNumberAndKind) {
  for (const std::uint32_t n : {1u, 9u, 10u, 4294967295u}) {
    const ResultMark answer = read_result_line(answered_line({n}, "a\n\u2028", "{}"), "");
    EXPECT_EQ(answer.line, RequestId{n});
    EXPECT_FALSE(answer.error);
    const ResultMark error = read_result_line(error_line({{n}, std::nullopt, "m", "", "c"}), "");
    EXPECT_EQ(error.line, RequestId{n});
    EXPECT_TRUE(error.error);
  }
}

TEST(ResultLine, OtherLinesAreRefused) {
  for (const char* text :
       {"", "x", "5", "[]", "{}", R"({"id":5})", R"({"id":"poise-"})", R"({"id":"poise-0"})",
        R"({"id":"poise-01"})", R"({"id":"poise-1x"})", R"({"id":"poise-4294967296"})",
        R"({"id":"poise--1"})", R"({"id":"batch-1","response":{"status_code":200,"body":{}}})",
        R"({"id":"poise-1"})", R"({"id":"poise-1","response":null})",
        R"({"id":"poise-1","response":{"status_code":"200","body":{}}})",
        R"({"id":"poise-1","response":{"status_code":200}})",
        R"({"id":"poise-1","response":{"status_code":200,"body":{}})"}) {
    EXPECT_THAT(complaint([&] { read_result_line(text, "file, line 4"); }).sentence,
                HasSubstr("file, line 4"))
        << text;
  }
}

}  // namespace
}  // namespace poise
