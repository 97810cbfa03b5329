#include "loader/host_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/trouble.h"

namespace poise {
namespace {

using ::testing::HasSubstr;

TEST(HostBudget, TheSmallerOfWhatIsAskedAndWhatIsThereIsTheCap) {
  EXPECT_EQ(host_budget(std::nullopt, kGiB * 20).cap, kGiB * 20);
  EXPECT_EQ(host_budget(kGiB * 8, kGiB * 20).cap, kGiB * 8);
  EXPECT_EQ(host_budget(kGiB * 8, kGiB * 20).notice, std::nullopt);
  const HostBudget clipped = host_budget(kGiB * 30, kGiB * 20);
  EXPECT_EQ(clipped.cap, kGiB * 20);
  EXPECT_THAT(clipped.notice.value_or(""), HasSubstr("30.0 GiB is more than the 20.0 GiB"));
}

TEST(HostBudget, NothingOrLessIsNoCap) {
  EXPECT_THROW(host_budget(Bytes{0}, kGiB), Failure);
  EXPECT_THROW(host_budget(Bytes{-5}, kGiB), Failure);
}

TEST(HostBudget, WeightsThatDoNotFitAreRefusedWithTheNumbers) {
  check_weights_fit(kGiB * 8, host_budget(kGiB * 8, kGiB * 20));
  try {
    check_weights_fit(kGiB * 9, host_budget(kGiB * 8, kGiB * 20));
    FAIL() << "9 GiB do not fit into 8";
  } catch (const Failure& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("take 9.0 GiB of host memory, but --host-memory allows "
                                          "8.0 GiB"));
  }
  try {
    check_weights_fit(kGiB * 21, host_budget(kGiB * 30, kGiB * 20));
    FAIL() << "21 GiB do not fit into 20";
  } catch (const Failure& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("this machine has 20.0 GiB available"));
  }
}

TEST(HostBudget, APoolMayHaveWhatTheWeightsLeave) {
  const HostBudget budget = host_budget(kGiB * 10, kGiB * 20);
  EXPECT_EQ(why_no_pool(kGiB * 4, kGiB * 6, budget, kGiB * 14), std::nullopt);
  EXPECT_THAT(why_no_pool(kGiB * 5, kGiB * 6, budget, kGiB * 14).value_or(""),
              HasSubstr("5.0 GiB beside 6.0 GiB of weights is too much: --host-memory allows"));
  EXPECT_THAT(why_no_pool(kGiB * 4, kGiB * 6, budget, kGiB * 3).value_or(""),
              HasSubstr("does not fit into the 3.0 GiB"));
}

TEST(HostBudget, SizesReadAsPeopleSayThem) {
  EXPECT_EQ(gib_text(kGiB * 3 / 2), "1.5 GiB");
  EXPECT_EQ(gib_text(kMiB * 3 / 2), "1.5 MiB");
}

}  // namespace
}  // namespace poise
