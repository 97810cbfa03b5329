// What is said of a log that lacks its beginning: what happened, and what to do.

#include "planner/record/log_extent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/order_log.h"
#include "tests/planner/requests/request_support.h"

namespace poise {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing_support::complaint;
using testing_support::ScratchDirectory;

class LogExtentTest : public testing::Test {
 protected:
  LogExtent extent() const { return OrderLogReader(log_).extent(); }
  std::string refusal() const {
    return complaint([&] { require_replayable(extent(), log_); }).sentence;
  }

  ScratchDirectory folder_;
  std::filesystem::path log_ = folder_ / "orders.log";
};

TEST_F(LogExtentTest, BehindADamagedLogNoSizeIsBlamed) {
  { OrderLog log(log_, "{}", {}, true); }
  EXPECT_THAT(refusal(), AllOf(HasSubstr("begins with segment 2"), HasSubstr("damaged"),
                               HasSubstr("another run directory"), Not(HasSubstr("-size"))));
  EXPECT_THAT(missing_text(extent()), AllOf(HasSubstr("damaged"), Not(HasSubstr("-size"))));
}

TEST_F(LogExtentTest, BehindSegmentsThatKeepNothingNoSizeIsBlamed) {
  { OrderLog log(log_, "{}", {.keeps = LogKeeps::off, .size = {}}); }
  { OrderLog log(log_, "{}"); }
  EXPECT_THAT(refusal(), AllOf(HasSubstr("--orders-log off"), HasSubstr("--orders-log full"),
                               Not(HasSubstr("-size"))));
}

TEST_F(LogExtentTest, WhereEarlierSegmentsAreNotThereALargerSizeIsTheRemedy) {
  { OrderLog log(log_, "{}", {.keeps = LogKeeps::tables, .size = {}}); }
  { OrderLog log(log_, "{}"); }
  std::filesystem::remove(log_);
  EXPECT_THAT(refusal(), AllOf(HasSubstr("begins with segment 2"),
                               HasSubstr("a larger --orders-log-size, or without one")));
}

}  // namespace
}  // namespace poise
