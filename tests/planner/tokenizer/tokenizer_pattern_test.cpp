#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/trouble.h"
#include "planner/tokenizer/pattern.h"

namespace poise {
namespace {

using testing::HasSubstr;

// The matches, empty ones as "".
std::vector<std::string> matches(const std::string& expression, const std::string& text) {
  std::vector<Pattern::Match> found;
  Pattern::compile(expression, "test").find_all(text, found);
  std::vector<std::string> parts;
  for (const Pattern::Match& match : found) {
    parts.push_back(text.substr(match.begin, match.end - match.begin));
  }
  return parts;
}

struct Example {
  const char* expression;
  const char* text;
  std::vector<std::string> expected;
};

TEST(Pattern, MatchesAsOnigurumaDoes) {
  const Example examples[] = {
      {"ab|a", "aab", {"a", "ab"}},
      {"a|ab", "aab", {"a", "a"}},
      {"a*", "baa", {"", "aa"}},
      {"a+?", "aa", {"a", "a"}},
      {"a{2}", "aaaaa", {"aa", "aa"}},
      {"a{2,3}", "aaaaa", {"aaa", "aa"}},
      {"a{1,2}?", "aaa", {"a", "a", "a"}},
      {"a{,2}b", "aaab", {"aab"}},
      {"a++a", "aaa", {}},
      {"a?+a", "aa", {"aa"}},
      {"(?>a+)a|b", "aab", {"b"}},
      {"(?:ab)+", "ababa", {"abab"}},
      {"(ab|a){2}", "aabab", {"aab"}},
      {"(?:a|b|)c", "acbcc", {"ac", "bc", "c"}},
      {"a(?=b)", "aab", {"a"}},
      {"a(?!b)", "aab", {"a"}},
      {R"(\s+(?!\S)|\s+)", "a   b  ", {"  ", " ", "  "}},
      {R"((?=(\d{3})+(?!\d)))", "1234567", {"", ""}},
      {".", "a\nb\r", {"a", "b", "\r"}},
      {R"([^\S\n]+)", "a \n\t", {" ", "\t"}},
      {R"([^\r\n\p{L}\p{N}]?\p{L}+)", "(ab\ncd 1", {"(ab", "cd"}},
      {R"(\p{^L}|\P{N})", "a1", {"a", "1"}},
      {R"(\p{Lu}\p{Ll}*)", "aÉt1é", {"Ét"}},
      {R"([一-龥]+)", "中a文", {"中", "文"}},
      {R"(\x41|\u00e9|\x{1F600})", "Aé😀", {"A", "é", "😀"}},
      {R"([a\-z\]\[^]+)", "a-]^[b", {"a-]^["}},
      {"[a-]+", "-a", {"-a"}},
      {"[-a]+", "-a", {"-a"}},
      {"[é-í]", "èéíî", {"é", "í"}},
      {"(?i:s)", "sSſß", {"s", "S", "ſ"}},
      {"(?i:k)", "kK\u212a", {"k", "K", "\u212a"}},
      {"(?i:[sdmt])x", "ſxDxqx", {"ſx", "Dx"}},
      {"(?i:'ll)|l", "'Lll", {"'Ll", "l"}},
      // White space and letters that other tables know differently.
      {R"(\s)", "\u180e\u200b\u0085\u3000", {"\u0085", "\u3000"}},
      {R"(\p{L}+)", "\U00031350\U00016D40", {"\U00031350\U00016D40"}},
  };
  for (const Example& example : examples) {
    EXPECT_EQ(matches(example.expression, example.text), example.expected)
        << example.expression << " on " << example.text;
  }
}

TEST(Pattern, ALiteralIsItself) {
  const std::string text = "a.b*(c)[d]{e}\\^$|+?é";
  std::vector<Pattern::Match> found;
  Pattern::literal(text, "test").find_all("x" + text + text, found);
  EXPECT_EQ(found.size(), 2u);
}

TEST(Pattern, WhatCouldMeanSomethingElseIsRefused) {
  const char* expressions[] = {
      "",
      "(",
      ")",
      "(a",
      "a)",
      "[",
      "[]a]",
      "[a",
      "[a[b]]",
      "[a&&b]",
      "[[:alpha:]]",
      "[b-a]",
      "[a-\\d]",
      "[\\d-a]",
      "a**",
      "a+?+",
      "a{2}?",
      "a{2}+",
      "a{2,1}",
      "a{",
      "a{x}",
      "{2}",
      "a{,}",
      "*a",
      "|*",
      "^a",
      "a$",
      "\\",
      "\\w",
      "\\W",
      "\\b",
      "\\h",
      "\\1",
      "\\G",
      "\\é",
      "\\p",
      "\\p{",
      "\\p{Han}",
      "\\p{Letter}",
      "\\p{}",
      "\\pL",
      "\\u12",
      "\\ud800",
      "\\x{110000}",
      "\\x80",
      "(?i)a",
      "(?m:a)",
      "(?<=a)",
      "(?<!a)",
      "(?<n>a)",
      "(?#x)",
      "(?i:ss)",
      "(?i:sT)",
      "(?i:é)",
      "(?i:[^a])",
      "(?i:[é])",
      "(?i:[\\d])",
      "(?i:\\p{Lu})",
      "(?=a)*",
      "(a*)*",
      "(a|)+",
      "((a?)+)+",
      "a{100001}",
      "(a{9}){9}{9}",
      "((((a{99}b){99}){99}){99})",
  };
  for (const char* expression : expressions) {
    try {
      Pattern::compile(expression, "DIR/tokenizer.json");
      ADD_FAILURE() << expression;
    } catch (const Failure& failure) {
      EXPECT_THAT(failure.what(), HasSubstr("DIR/tokenizer.json: ")) << expression;
      EXPECT_THAT(failure.what(), HasSubstr("pattern")) << expression;
    }
  }
  EXPECT_THROW(Pattern::compile(std::string(100000, 'a'), "test"), Failure);
  EXPECT_THROW(Pattern::compile(std::string(30000, '('), "test"), Failure);
}

TEST(Pattern, AHostileExpressionEndsWithASentence) {
  const struct {
    const char* expression;
    std::string text;
  } cases[] = {
      {"(?:a+)+b", std::string(5000, 'a')},
      {"(?:a|aa)+b", std::string(5000, 'a')},
      {"(?:a|a)*b", std::string(5000, 'a')},
      {"a*a*a*a*a*b", std::string(5000, 'a')},
      {R"((?=(\d{3})+(?!\d)))", std::string(100000, '1')},
      {"[a-z]+!", std::string(100000, 'a')},
  };
  for (const auto& [expression, text] : cases) {
    try {
      matches(expression, text);
      ADD_FAILURE() << expression;
    } catch (const Failure& failure) {
      EXPECT_THAT(failure.what(), HasSubstr("steps for a text of")) << expression;
    }
  }
}

}  // namespace
}  // namespace poise
