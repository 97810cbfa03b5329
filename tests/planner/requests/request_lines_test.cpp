#include "planner/requests/request_lines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/planner/requests/request_support.h"

namespace poise {
namespace {

using ::testing::HasSubstr;
using testing_support::complaint;
using testing_support::ScratchDirectory;

// "NUMBER:TEXT" of every line; "NUMBER!" for one that is too long.
std::vector<std::string> lines_of(const std::string& content, Bytes longest = kLongestLine) {
  const ScratchDirectory scratch;
  RequestLines lines(scratch.write("in", content), longest);
  std::vector<std::string> all;
  while (const auto line = lines.next()) {
    all.push_back(line->too_long ? fmt::format("{}!", line->number.n)
                                 : fmt::format("{}:{}", line->number.n, line->text));
  }
  return all;
}

using Lines = std::vector<std::string>;

TEST(RequestLines, BlankLinesCountAndAreSkipped) {
  EXPECT_EQ(lines_of("a\n\n \t\r\n\nb\n"), (Lines{"1:a", "5:b"}));
}

TEST(RequestLines, ALastLineNeedsNoNewline) { EXPECT_EQ(lines_of("a\nb"), (Lines{"1:a", "2:b"})); }

TEST(RequestLines, EmptyAndBlankFilesHaveNone) {
  for (const char* content : {"", "\n", "\n\n  \n", "\xef\xbb\xbf", "\xef\xbb\xbf\r\n"}) {
    EXPECT_EQ(lines_of(content), Lines{}) << content;
  }
}

TEST(RequestLines, AByteOrderMarkAndCrlfAreTakenOff) {
  EXPECT_EQ(lines_of("\xef\xbb\xbf"
                     "a\r\nb\r\n\r\nc\r"),
            (Lines{"1:a", "2:b", "4:c"}));
}

TEST(RequestLines, OnlyOneCarriageReturnBelongsToTheNewline) {
  EXPECT_EQ(lines_of("a\r\r\n"), (Lines{"1:a\r"}));
}

TEST(RequestLines, ALineBeyondTheLimitIsPassedOver) {
  const Bytes limit{10};
  EXPECT_EQ(lines_of("0123456789\n01234567890\nb\n", limit), (Lines{"1:0123456789", "2!", "3:b"}));
  EXPECT_EQ(lines_of("a\n01234567890", limit), (Lines{"1:a", "2!"}));
  EXPECT_EQ(lines_of(std::string(5 << 20, 'x') + "\nb", limit), (Lines{"1!", "2:b"}));
}

TEST(RequestLines, LinesMayLieAcrossWhatIsReadAtOnce) {
  constexpr std::size_t kMebi = 1 << 20;
  for (std::size_t first : {kMebi - 2, kMebi - 1, kMebi, kMebi + 1, 2 * kMebi, 3 * kMebi - 1}) {
    const std::string a(first, 'a'), b(kMebi + 7, 'b');
    EXPECT_EQ(lines_of(a + "\r\n" + b + "\nc"), (Lines{"1:" + a, "2:" + b, "3:c"})) << first;
    EXPECT_EQ(lines_of(a + "\n"), (Lines{"1:" + a})) << first;
  }
}

TEST(RequestLines, NulBytesAreContent) {
  EXPECT_EQ(lines_of(std::string("a\0b\n\0\n", 6)),
            (Lines{std::string("1:a\0b", 5), std::string("2:\0", 3)}));
}

TEST(RequestLines, EveryByteIsShownOnceInOrder) {
  const std::string content = "\xef\xbb\xbf" + std::string(1'500'000, 'x') + "\n\n\xff\x80";
  const ScratchDirectory scratch;
  std::string seen;
  RequestLines lines(scratch.write("in", content), Bytes{100}, [&](auto bytes) {
    seen.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  while (lines.next()) {
  }
  EXPECT_EQ(seen, content);
}

TEST(RequestLines, WhatIsPlainlyNoTextIsSaidInWords) {
  struct Row {
    std::string start;
    const char* says;
  };
  for (const Row& row : std::vector<Row>{{"\x1f\x8b\x08", "gzip"},
                                         {"\x28\xb5\x2f\xfd", "zstd"},
                                         {"\xfd"
                                          "7zXZ",
                                          "xz"},
                                         {"BZh9", "bzip2"},
                                         {"PK\x03\x04", "zip"},
                                         {std::string("\xff\xfe{\0", 4), "UTF-16"},
                                         {std::string("\xfe\xff\0{", 4), "UTF-16"}}) {
    const auto said = complaint([&] { lines_of(row.start + "more"); });
    EXPECT_EQ(said.code, Exit::cannot_start);
    EXPECT_THAT(said.sentence, HasSubstr(row.says));
  }
}

TEST(RequestLines, OnlyRegularFilesAreRead) {
  const ScratchDirectory scratch;
  ASSERT_EQ(::mkfifo((scratch / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("loop", scratch / "loop");
  std::filesystem::create_symlink("nowhere", scratch / "broken");
  for (const std::filesystem::path& path :
       {scratch / "pipe", scratch.path(), scratch / "loop", scratch / "broken", scratch / "missing",
        std::filesystem::path("/dev/null"), std::filesystem::path("/dev/zero")}) {
    EXPECT_EQ(complaint([&] { RequestLines lines(path); }).code, Exit::cannot_start) << path;
  }
}

TEST(RequestLines, AFileThatGrowsMeanwhileIsNotBelieved) {
  const ScratchDirectory scratch;
  const auto path = scratch.write("in", "a\n");
  RequestLines lines(path);
  EXPECT_TRUE(lines.next());
  std::ofstream(path, std::ios::app) << "b\n";
  EXPECT_EQ(complaint([&] { lines.next(); }).code, Exit::cannot_start);
}

}  // namespace
}  // namespace poise
