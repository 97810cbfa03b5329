#include "common/row_groups.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <utility>

namespace poise {
namespace {

using Expected = std::vector<std::pair<std::size_t, std::int32_t>>;  // end, rows

// Groups leave no mini-batch out and take none twice.
Expected ends_of(const std::vector<RowGroup>& groups) {
  Expected ends;
  std::size_t begin = 0;
  for (const RowGroup& group : groups) {
    EXPECT_EQ(group.begin, begin);
    EXPECT_LT(group.begin, group.end);
    begin = group.end;
    ends.emplace_back(group.end, group.rows);
  }
  return ends;
}

std::vector<BatchRows> one_behind_the_other(const std::vector<std::int32_t>& counts) {
  std::vector<BatchRows> batches;
  std::int64_t first = 0;
  for (const std::int32_t count : counts) {
    batches.push_back({first, count});
    first += count;
  }
  return batches;
}

TEST(RowGroups, HoldAsManyNeighboursAsTheBuffersHaveRowsFor) {
  const auto groups = [](const std::vector<std::int32_t>& counts, std::int32_t max_rows) {
    return ends_of(row_groups(one_behind_the_other(counts), max_rows));
  };
  EXPECT_EQ(groups({}, 8), Expected{});
  EXPECT_EQ(groups({3}, 8), (Expected{{1, 3}}));
  EXPECT_EQ(groups({3, 5}, 8), (Expected{{2, 8}}));
  EXPECT_EQ(groups({3, 6}, 8), (Expected{{1, 3}, {2, 6}}));
  EXPECT_EQ(groups({4, 4, 1, 7, 8, 1}, 8), (Expected{{2, 8}, {4, 8}, {5, 8}, {6, 1}}));
  EXPECT_EQ(groups({1, 9, 1}, 8), (Expected{{1, 1}, {2, 9}, {3, 1}}));
}

TEST(RowGroups, DoNotJoinRowsThatDoNotFollowOneAnother) {
  EXPECT_EQ(ends_of(row_groups(std::vector<BatchRows>{{4, 2}, {2, 2}, {0, 2}}, 8)),
            (Expected{{1, 2}, {2, 2}, {3, 2}}));
  EXPECT_EQ(ends_of(row_groups(std::vector<BatchRows>{{0, 2}, {2, 2}, {6, 2}}, 8)),
            (Expected{{2, 4}, {3, 2}}));
}

// Where one group holds everything, so does it; otherwise the mini-batches of host cores have groups of their own.
TEST(RowGroups, OfHostCoresAreApartWhereOneGroupIsNotEnough) {
  const auto groups = [](std::int32_t max_rows) {
    std::vector<BatchRows> batches = one_behind_the_other({3, 5, 2, 1, 4});
    for (std::size_t i = 2; i < batches.size(); ++i) {
      batches[i].on_host = true;
    }
    return row_groups(batches, max_rows);
  };
  EXPECT_EQ(ends_of(groups(15)), (Expected{{5, 15}}));
  EXPECT_EQ(sent_ahead(groups(15)), nullptr);
  const std::vector<RowGroup> apart = groups(14);
  EXPECT_EQ(ends_of(apart), (Expected{{2, 8}, {5, 7}}));
  EXPECT_EQ(sent_ahead(apart), &apart[1]);
  const std::vector<RowGroup> small = groups(5);
  EXPECT_EQ(ends_of(small), (Expected{{1, 3}, {2, 5}, {4, 3}, {5, 4}}));
  EXPECT_EQ(sent_ahead(small), &small[2]) << "the first of two";
  EXPECT_EQ(sent_ahead(std::span(small).subspan(2)), nullptr) << "it is the first anyway";
}

TEST(RowGroups, OfAnIterationAreThoseOfItsMiniBatchesInOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 100; ++round) {
    messages::IterationT iteration;
    std::vector<std::int32_t> counts(random() % 9);
    for (std::int32_t& count : counts) {
      count = 1 + static_cast<std::int32_t>(random() % 6);
      iteration.mini_batches.push_back(std::make_unique<messages::MiniBatchT>());
      iteration.mini_batches.back()->tokens.resize(static_cast<std::size_t>(count));
    }
    EXPECT_EQ(ends_of(row_groups(iteration, 8)),
              ends_of(row_groups(one_behind_the_other(counts), 8)));
  }
}

}  // namespace
}  // namespace poise
