#include "common/files/json_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <vector>

#include "common/trouble.h"
#include "tests/support/complaint.h"

namespace poise {
namespace {

using testing_support::complaint;

using ::testing::HasSubstr;

std::string complaint_about(std::string_view text, const JsonLimits& limits = {}) {
  return complaint([&] { parse_json(text, "a.json", limits); });
}

struct Refused {
  std::string_view text;
  std::string_view says;
};

TEST(JsonFile, WhatIsNotJsonIsRefusedWithItsPlace) {
  const std::vector<Refused> table{
      {"", "not valid JSON at byte 1"},
      {" ", "unexpected end of input"},
      {"{\"a\": nul}", "at byte 10: "},
      {"{\"a\": 1,\n\"b\": }", "line 2, column 6"},
      {"{\"a\": 1} {\"b\": 2}", "expected end of input"},
      {"{\"a\": 1,}", "expected string literal"},
      {"[1, 2", "unexpected end of input"},
      {"// comment\n1", "line 1"},
      {"NaN", "invalid literal"},
      {"[Infinity]", "invalid literal"},
      {"[-Infinity]", "invalid number"},
      {"[1e999]", "number overflow"},
      {"[01]", "byte 3"},
      {"\"\xff\"", "ill-formed UTF-8"},
      {"\"\xc0\x80\"", "ill-formed UTF-8"},
      {"\"\\ud800\"", "surrogate"},
      {"\"a\nb\"", "control character"},
      {std::string_view("\"a\0b\"", 5), "control character"},
      {std::string_view("{\"a\": 1}\0", 9), "not valid JSON at byte 9: a NUL byte"},
      {std::string_view("1 \0 2", 5), "not valid JSON at byte 3: a NUL byte"},
      {std::string_view("{\"a\":\0 1}", 9), "not valid JSON at byte 6: a NUL byte"},
      {std::string_view("\0\0", 2), "not valid JSON at byte 1: a NUL byte"},
      {"\xef\xbb", "byte"},
  };
  for (const Refused& row : table) {
    const std::string sentence = complaint_about(row.text);
    EXPECT_THAT(sentence, HasSubstr("a.json: not valid JSON at ")) << row.text;
    EXPECT_THAT(sentence, HasSubstr(row.says)) << row.text;
    EXPECT_EQ(sentence.find('\n'), std::string::npos) << sentence;
  }
}

TEST(JsonFile, AByteOrderMarkAtTheStartIsAccepted) {
  EXPECT_EQ(parse_json("\xef\xbb\xbf[1]", "a.json"), nlohmann::json({1}));
}

TEST(JsonFile, AValueComesOutAsTheLibraryItselfReadsIt) {
  constexpr std::string_view kText =
      R"({"a": [1, -2, 3.5, {"b": null, "c": [[], {}]}, "é\n\ud83d\ude00"], "d": {"e": {"f": true}}, "": 18446744073709551615})";
  EXPECT_EQ(parse_json(kText, ""), nlohmann::json::parse(kText));
}

TEST(JsonFile, TheSameNameTwiceInOneObjectIsRefused) {
  EXPECT_THAT(complaint_about(R"({"a": {"b": 1}, "c": 2, "a": 3})"),
              HasSubstr("a.json: the name \"a\" appears twice"));
  EXPECT_THAT(complaint_about(R"([{"x": 1, "\u0078": 2}])"), HasSubstr("\"x\" appears twice"));
  EXPECT_EQ(complaint_about(R"([{"a": 1}, {"a": {"a": 2}}])"), "nothing was refused");
}

TEST(JsonFile, DepthIsCappedHoweverDeepTheTextGoes) {
  const auto nested = [](int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') +
           std::string(static_cast<std::size_t>(depth), ']');
  };
  EXPECT_EQ(complaint_about(nested(64)), "nothing was refused");
  EXPECT_THAT(complaint_about(nested(65)), HasSubstr("more than 64 deep"));
  EXPECT_THAT(complaint_about(std::string(3'000'000, '[')), HasSubstr("more than 64 deep"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) {
    objects += "{\"a\":";
  }
  EXPECT_THAT(complaint_about(objects), HasSubstr("more than 64 deep"));
}

TEST(JsonFile, SizeIsCapped) {
  EXPECT_THAT(complaint_about("[1, 2, 3]", {.size = {8}}), HasSubstr("9 bytes of JSON; at most 8"));
}

TEST(JsonFile, TheNumberOfValuesIsCapped) {
  EXPECT_EQ(complaint_about("[1, 2, 3]", {.values = 4}), "nothing was refused");
  EXPECT_THAT(complaint_about("[1, 2, 3]", {.values = 3}), HasSubstr("more than 3 values"));
}

TEST(JsonFile, AMessageStaysOnOneLineAndShortWhateverTheTextHolds) {
  std::string name(100'000, 'x');
  name += "\x1b[31m\n";
  const std::string text = "{\"" + std::string(100'000, 'x') + "\\u001b\\n\": 1, \"" +
                           std::string(100'000, 'x') + "\\u001b\\n\": 1}";
  for (const std::string& sentence :
       {complaint_about(text), complaint_about("[\"" + name + "\"]")}) {
    EXPECT_LT(sentence.size(), 400u);
    for (const char c : sentence) {
      EXPECT_GE(static_cast<unsigned char>(c), 0x20u);
    }
  }
}

TEST(JsonFile, ShownTextIsValidOneLineUtf8) {
  EXPECT_EQ(shown("plain é 😀"), "plain é 😀");
  EXPECT_EQ(shown("a\nb\x1b"), "a\\x0ab\\x1b");
  EXPECT_EQ(shown("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(shown("\xe2\x80\xa8"), "\\xe2\\x80\\xa8");  // U+2028, a line separator
  EXPECT_EQ(shown("abcdef", 3), "abc…");
}

TEST(JsonObject, IntegersAreIntegersAndNothingElse) {
  const auto document = parse_json(
      R"({"a": 12, "b": "12", "c": true, "d": 1.5, "e": 8.0, "f": -1, "g": 1e300, "h": null,
          "i": [1], "j": 18446744073709551615, "k": 9223372036854775808.0})",
      "");
  const JsonObject object(document, "c.json");
  constexpr JsonObject::Integers kRange{.min = 0, .max = 100};
  EXPECT_EQ(object.integer("a", kRange), 12);
  EXPECT_EQ(object.integer("e", kRange), 8);
  EXPECT_EQ(object.integer("h", kRange), std::nullopt);
  EXPECT_EQ(object.integer("absent", kRange), std::nullopt);
  const auto says = [&](const char* name) {
    return complaint([&] { object.integer(name, kRange); });
  };
  EXPECT_EQ(says("b"), "c.json: \"b\" must be an integer from 0 to 100, not \"12\"");
  EXPECT_EQ(says("c"), "c.json: \"c\" must be an integer from 0 to 100, not true");
  EXPECT_EQ(says("d"), "c.json: \"d\" must be an integer from 0 to 100, not 1.5");
  EXPECT_EQ(says("f"), "c.json: \"f\" must be an integer from 0 to 100, not -1");
  EXPECT_EQ(says("g"), "c.json: \"g\" must be an integer from 0 to 100, not 1e+300");
  EXPECT_EQ(says("i"), "c.json: \"i\" must be an integer from 0 to 100, not a list");
  EXPECT_THAT(says("j"), HasSubstr("not 18446744073709551615"));
  EXPECT_THAT(says("k"), HasSubstr("must be an integer"));
}

// Names and values of a file stand in refusals, whatever characters they hold.
TEST(JsonObject, ARefusalIsOneLineWhateverTheFileHolds) {
  const nlohmann::json document = nlohmann::json::parse("{\"a\\u007fb\": {\"c\": 1}}");
  const JsonObject outer(document, "file");
  const JsonObject inner = *outer.object("a\x7f" "b");
  try {
    inner.refuse("c", "is \"x\ny\"");
    FAIL();
  } catch (const Failure& failure) {
    EXPECT_STREQ(failure.what(), "file: in \"a\\x7fb\": \"c\" is \"x\\x0ay\"");
  }
}

TEST(JsonObject, OtherTypesAreHeldToTheirNamesToo) {
  const auto document = parse_json(
      R"({"n": 0.5, "s": "x", "b": false, "l": [1, 2], "one": 7, "bad": [1, "2"], "o": {"p": "q"}})",
      "");
  const JsonObject object(document, "");
  EXPECT_EQ(object.number("n", {}), 0.5);
  EXPECT_EQ(object.string("s"), "x");
  EXPECT_EQ(object.boolean("b"), false);
  EXPECT_EQ(object.integers("l", {}), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(object.integers("one", {}), (std::vector<std::int64_t>{7}));
  EXPECT_EQ(complaint([&] { object.number("s", {}); }), "\"s\" must be a number, not \"x\"");
  EXPECT_EQ(complaint([&] { object.number("n", {.min = 1, .max = 2}); }),
            "\"n\" must be a number from 1 to 2, not 0.5");
  EXPECT_EQ(complaint([&] { object.boolean("n"); }), "\"n\" must be true or false, not 0.5");
  EXPECT_EQ(complaint([&] { object.string("b"); }), "\"b\" must be a string, not false");
  EXPECT_EQ(complaint([&] { object.integers("bad", {}); }),
            "\"bad\" must be an integer or a list of such, not a list with \"2\"");
  EXPECT_EQ(complaint([&] { object.object("o")->integer("p", {}); }),
            "in \"o\": \"p\" must be an integer, not \"q\"");
  EXPECT_EQ(complaint([&] { object.object("l"); }), "\"l\" must be an object, not a list");
  EXPECT_EQ(complaint([&] { JsonObject(document["l"], "x"); }),
            "x: a JSON object is needed, not a list");
}

// Whatever a text is turned into, it is either read as the library reads it, or refused in one
// line.
TEST(JsonFile, RandomDamageNeverGetsPastTheRules) {
  const auto seed = static_cast<unsigned>(::testing::UnitTest::GetInstance()->random_seed());
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const std::string sound =
      R"({"a": [1, 2.5e3, "text\u00e9"], "b": {"c": {"d": [true, false, null]}}, "e": "\ud83d\ude00"})";
  int read = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text = sound;
    for (std::uint32_t change = random() % 4; change <= 4; ++change) {
      const std::size_t at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, 1 + random() % 3);
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 12));
      }
      if (text.empty()) {
        text = " ";
      }
    }
    try {
      const nlohmann::json value = parse_json(text, "");
      ASSERT_EQ(value, nlohmann::json::parse(text));
      ++read;
    } catch (const Failure& failure) {
      ASSERT_EQ(std::string_view(failure.what()).find('\n'), std::string_view::npos);
    }
  }
  EXPECT_GT(read, 0);
}

}  // namespace
}  // namespace poise
