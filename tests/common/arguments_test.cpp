#include "common/arguments.h"

#include <gtest/gtest.h>

#include "common/trouble.h"

namespace poise {
namespace {

cxxopts::ParseResult parsed(const std::vector<const char*>& argv) {
  cxxopts::Options options("a-program", "Tests.");
  options.add_options()("host-memory", "", cxxopts::value<std::int64_t>())(
      "seed", "", cxxopts::value<std::uint64_t>()->default_value("0"))(
      "speed", "", cxxopts::value<double>())("model", "", cxxopts::value<std::string>())("json",
                                                                                         "");
  return parse_arguments(options, with_hyphens(static_cast<int>(argv.size()), argv.data()));
}

std::string refusal(const std::vector<const char*>& argv) {
  try {
    parsed(argv);
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::cannot_start);
    return failure.what();
  }
  return "none";
}

TEST(Arguments, AnUnderscoreInANamePassesForAHyphenAndInAValueStays) {
  const auto given = parsed({"a-program", "--host_memory=3", "--model=a_b", "--json"});
  EXPECT_EQ(given["host-memory"].as<std::int64_t>(), 3);
  EXPECT_EQ(required_argument(given, "model"), "a_b");
}

TEST(Arguments, NumbersOfEveryTypeAreRead) {
  const auto given = parsed({"a-program", "--host-memory=-9223372036854775808",
                             "--seed=18446744073709551615", "--speed=5e-1"});
  EXPECT_EQ(given["host-memory"].as<std::int64_t>(), INT64_MIN);
  EXPECT_EQ(given["seed"].as<std::uint64_t>(), UINT64_MAX);
  EXPECT_EQ(given["speed"].as<double>(), 0.5);
}

TEST(Arguments, WhatIsWrongIsASentenceThatNamesIt) {
  const std::vector<std::pair<std::vector<const char*>, const char*>> cases{
      {{"a-program", "--modle", "x"}, "modle"},
      {{"a-program", "--model"}, "model"},
      {{"a-program", "--host-memory", "lots"}, "lots"},
      {{"a-program", "--seed=18446744073709551616"}, "18446744073709551616"},
      {{"a-program", "stray\n"}, "\"stray\\x0a\""}};
  for (const auto& [argv, names] : cases) {
    EXPECT_NE(refusal(argv).find(names), std::string::npos) << refusal(argv);
    EXPECT_NE(refusal(argv).find("a-program --help"), std::string::npos) << refusal(argv);
  }
}

TEST(Arguments, WhatIsRequiredMustBeThereAndNotEmpty) {
  EXPECT_THROW(required_argument(parsed({"a-program"}), "model"), Failure);
  EXPECT_THROW(required_argument(parsed({"a-program", "--model="}), "model"), Failure);
}

}  // namespace
}  // namespace poise
