#include "planner/schedule/culprit_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <random>

namespace poise {
namespace {

using Parts = std::vector<RequestPart>;

// Requests that run one token an iteration from `context` on. `culprit` kills what runs its token `at`.
struct Work {
  std::vector<std::int32_t> contexts;  // by request
  std::uint32_t culprit;
  std::int32_t at;

  Parts next(const CulpritSearch& search) const {
    const std::vector<RequestId> probe = search.probe();
    Parts parts;
    for (std::uint32_t i = 0; i < contexts.size(); ++i) {
      const bool may = probe.empty() || std::ranges::find(probe, RequestId{i}) != probe.end();
      if (may) {
        parts.push_back({.request = {i}, .end = contexts[i] + 1});
      }
    }
    return parts;
  }
  bool kills(const Parts& parts) const {
    return std::ranges::find(parts, RequestPart{{culprit}, at + 1}) != parts.end();
  }
  void run(const Parts& parts) {
    for (const RequestPart& part : parts) {
      contexts[part.request.n] = part.end;
    }
  }
};

TEST(CulpritSearch, FindsTheRequestThatKillsWithinTheLogarithmOfDeaths) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    Work work{.contexts = std::vector<std::int32_t>(1 + random() % 70)};
    for (std::int32_t& context : work.contexts) {
      context = static_cast<std::int32_t>(random() % 50);
    }
    work.culprit = static_cast<std::uint32_t>(random() % work.contexts.size());
    work.at = work.contexts[work.culprit] + static_cast<std::int32_t>(random() % 4);
    CulpritSearch search;
    std::optional<RequestId> found;
    int deaths = 0;
    for (int step = 0; step < 200 && !found; ++step) {
      const Parts parts = work.next(search);
      if (work.kills(parts)) {
        ++deaths;
        found = search.died(parts);
      } else {
        search.survived(parts);
        work.run(parts);
      }
    }
    ASSERT_EQ(found, RequestId{work.culprit}) << "trial " << trial;
    EXPECT_LE(deaths, 2 + std::bit_width(work.contexts.size())) << "trial " << trial;
    EXPECT_FALSE(search.searching());
    EXPECT_TRUE(search.probe().empty());
  }
}

TEST(CulpritSearch, ADeathThatNoRequestCausedConvictsNone) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 300; ++trial) {
    Work work{.contexts = std::vector<std::int32_t>(2 + random() % 30), .culprit = 0, .at = -2};
    CulpritSearch search;
    for (int step = 0; step < 100; ++step) {
      const Parts parts = work.next(search);
      // At most two in a row: so often may an operator hit the same iteration.
      for (int kills = static_cast<int>(random() % 3); kills > 0 && parts.size() > 1; --kills) {
        EXPECT_EQ(search.died(parts), std::nullopt);
      }
      const Parts again = work.next(search);
      search.survived(again);
      work.run(again);
    }
  }
}

TEST(CulpritSearch, ASuspectIsNotClearedBeforeItGotPastTheRowsItDiedWith) {
  CulpritSearch search;
  const Parts both{{{1}, 100}, {{2}, 30}};
  EXPECT_EQ(search.died(both), std::nullopt);
  EXPECT_TRUE(search.probe().empty()) << "one death says nothing";
  // Another executor: what its device has lost is computed again first, up to token 40.
  search.survived(Parts{{{1}, 40}, {{2}, 30}});
  EXPECT_EQ(search.state().suspects, (Parts{{{1}, 100}}));
  EXPECT_EQ(search.died(Parts{{{1}, 100}, {{2}, 31}}), std::nullopt);
  EXPECT_EQ(search.probe(), (std::vector<RequestId>{{1}}));
  search.survived(Parts{{{1}, 40}});
  EXPECT_TRUE(search.searching());
  EXPECT_EQ(search.died(Parts{{{1}, 100}}), RequestId{1});
}

TEST(CulpritSearch, GoesOnFromItsState) {
  CulpritSearch search;
  search.died(Parts{{{1}, 1}, {{2}, 1}, {{3}, 1}});
  search.died(Parts{{{1}, 1}, {{2}, 1}, {{3}, 1}});
  CulpritSearch next(search.state());
  EXPECT_EQ(next.probe(), (std::vector<RequestId>{{1}, {2}}));
  next.end();
  EXPECT_TRUE(next.probe().empty());
}

}  // namespace
}  // namespace poise
