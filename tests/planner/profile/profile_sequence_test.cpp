#include "planner/profile/profile_sequence.h"

#include <gtest/gtest.h>

#include <string>

namespace poise {
namespace {

const char* letter_of(ProfileWork work) {
  switch (work) {
    case ProfileWork::prompts_here:
      return "h";
    case ProfileWork::prompts_kv:
      return "k";
    case ProfileWork::prompts_act:
      return "a";
    case ProfileWork::context_few:
      return "f";
    case ProfileWork::context_apart:
      return "p";
    case ProfileWork::context_together:
      return "t";
    case ProfileWork::context_host:
      return "c";
    case ProfileWork::context_host_link:
      return "l";
    case ProfileWork::context_absorbed:
      return "s";
    case ProfileWork::context_busy:
      return "b";
  }
  return "?";
}

// A letter and the round of each work; those that warm up have no round.
std::string taken(ProfileSequence& order) {
  std::string all;
  while (!order.empty()) {
    const ProfileSequence::Work work = order.take();
    all += letter_of(work.work) + (work.warms_up ? std::string(".") : std::to_string(work.round));
  }
  return all;
}

TEST(ProfileSequence, OfADeviceThatDoesNotHeatBusyWorksComeLast) {
  ProfileSequence order;
  order.begin(2, false);
  EXPECT_EQ(order.left(), 1u + 2 * 6);
  EXPECT_EQ(taken(order), "h0k0a0f0p0t0k1a1f1p1t1");
  EXPECT_TRUE(order.only_busy_left());
  EXPECT_EQ(order.left(), 2u);
  order.add_busy(0);
  EXPECT_EQ(taken(order), "b0b1");
  EXPECT_FALSE(order.only_busy_left());
}

TEST(ProfileSequence, HostCoresAreMeasuredAloneAndBesideTheLinkWhereTheyAttend) {
  ProfileSequence order;
  order.begin(2, false, true);
  EXPECT_EQ(taken(order), "h0k0a0f0p0t0c0l0k1a1f1p1t1c1l1");
}

TEST(ProfileSequence, ActivationsThatAreAttendedAreMeasuredWhereTheDeviceDoesThat) {
  ProfileSequence order;
  order.begin(2, false, true, true);
  EXPECT_EQ(taken(order), "h0k0a0f0p0t0c0l0s0k1a1f1p1t1c1l1s1");
}

TEST(ProfileSequence, OfADeviceThatHeatsPromptsAreMeasuredBehindBusyWorksAndOnlyFillBlocksBefore) {
  ProfileSequence order;
  order.begin(4, true);
  EXPECT_EQ(taken(order), "h0k.a.f0p0t0f1p1t1f2p2t2f3p3t3");
  order.add_busy(2);
  EXPECT_EQ(taken(order), "b.b.b0b1b2b3b.k0b.a0k1a1k2a2b.k3b.a3")
      << "a warm-up comes before each large work of prompts";
}

TEST(ProfileSequence, WorksThatAreAskedForAgainComeInEveryRound) {
  ProfileSequence order;
  order.begin(3, false);
  taken(order);
  order.add_busy(0);
  taken(order);
  order.add([](ProfileWork work) { return work == ProfileWork::context_apart; });
  EXPECT_EQ(taken(order), "p0p1p2");
  order.repeat({.work = ProfileWork::context_few, .round = 0}, 3);
  EXPECT_EQ(taken(order), "f0f0f0");
}

}  // namespace
}  // namespace poise
