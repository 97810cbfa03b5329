// What a log's readers are given.

#include "planner/record/log_digest.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "planner/record/log_note.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

using Numbers = std::vector<std::uint64_t>;

const char* const kHeader = R"({"kv_row_bytes": 8, "act_row_bytes": 4, "layers": 1})";

class LogDigestTest : public ::testing::Test {
 protected:
  // Appends an iteration: its tables and, once `done`, its answers.
  void iterate(std::uint64_t number, bool done = true) {
    OrderLog log(log_, kHeader);
    messages::IterationT tables;
    tables.iteration = number;
    log_note(log, "1", std::move(tables));
    if (done) {
      messages::IterationDoneT answers;
      answers.iteration = number;
      log_note(log, "1", std::move(answers));
    }
  }
  // The iterations that a reader is given, up to `until`.
  static Numbers read(LogDigest& log, std::optional<std::uint64_t> until = {}) {
    Numbers numbers;
    LogReaders readers;
    readers.until = until;
    readers.iteration = [&](const LoggedIteration& iteration) {
      numbers.push_back(iteration.tables.iteration);
    };
    log.read(readers);
    return numbers;
  }

  testing_support::TempDirectory directory_;
  std::filesystem::path log_ = directory_.path() / "orders.log";
};

TEST_F(LogDigestTest, ALogThatGrowsIsReadTwiceAsFarAsItWasAtFirst) {
  iterate(1);
  iterate(2, false);
  LogDigest log(log_);
  EXPECT_EQ(read(log), (Numbers{1, 2}));
  iterate(3);
  EXPECT_EQ(read(log), (Numbers{1, 2}));
  EXPECT_EQ(log.records(), 3u);
}

TEST_F(LogDigestTest, ReadingEndsWhereALaterIterationBegins) {
  for (const std::uint64_t number : {1, 2, 3, 4}) {
    iterate(number);
  }
  const auto whole = static_cast<std::uintmax_t>(std::filesystem::file_size(log_));
  std::filesystem::resize_file(log_, whole - 9);  // what is torn behind does not matter
  LogDigest log(log_);
  EXPECT_EQ(read(log, 2), (Numbers{1, 2}));
  EXPECT_EQ(log.torn_tail(), Bytes{0});
  EXPECT_EQ(read(log), (Numbers{1, 2, 3, 4})) << "the last one is not done";
  EXPECT_GT(log.torn_tail(), Bytes{0});
}

}  // namespace
}  // namespace poise
