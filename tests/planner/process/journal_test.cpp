#include "planner/process/journal.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <random>

#include "common/trouble.h"
#include "tests/support/model_files.h"

namespace poise {
namespace {

Journal a_journal() {
  Journal journal{.run_id = "abc123",
                  .build = "poise test",
                  .model = "model",
                  .input = "input",
                  .pool_epoch = 3,
                  .partition = {.region_bytes = 1 << 20, .act_blocks = 7, .kv_blocks = 9},
                  .gpu_act_blocks = 2,
                  .gpu_kv_blocks = 5,
                  .executor = 77,
                  .iteration = 41,
                  .prompt_tokens = 100,
                  .generated_tokens = 200,
                  .preemptions = 1,
                  .elapsed = 1.5,
                  .totals = {.layer_orders = 1,
                             .weights = 2,
                             .kv = 3,
                             .act = 4,
                             .stores = 5,
                             .copy_in_busy_ns = 6,
                             .compute_busy_ns = 7,
                             .copy_out_busy_ns = 8,
                             .compute_wait_ns = 9},
                  .predicted = {.decoding = 10,
                                .decode_predicted = {11.5},
                                .decode_measured = {12.5},
                                .predicted = {13.5},
                                .measured = {14.5}},
                  .requests = {},
                  .answers = {},
                  .search = {.suspects = {{{4}, 60}, {{9}, 3}}, .searching = true}};
  journal.requests.push_back({.request = {4},
                              .answer = {5, 6, 1'000'000},
                              .prompt_values = 12,
                              .running = true,
                              .stored = 60,
                              .token_blocks = 1,
                              .blocks = {{BlockKind::kv, Place::nowhere, BlockId{0}},
                                         {BlockKind::kv, Place::host, BlockId{8}},
                                         {BlockKind::act, Place::host, BlockId{0}},
                                         {BlockKind::act, Place::gpu, BlockId{4'000'000'000}}},
                              .lost = {1}});
  journal.requests.push_back({.request = {9}, .answer = {}, .blocks = {}});
  const float infinity = std::numeric_limits<float>::infinity();
  journal.answers.push_back(
      {.request = {4},
       .prompt_ran = true,
       .prompt_values = {{.logprob = -0.1F, .top = {{1, -0.1F}, {2, -infinity}}}},
       .values = {{.logprob = -1e-30F, .top = {}},
                  {.logprob = -3.3333333F, .top = {{6, -3.3333333F}}},
                  {.logprob = 0, .top = {}}}});
  return journal;
}

void expect_same(const Journal& got, const Journal& wanted) {
  EXPECT_NO_THROW(check_same_work(got, wanted));
  EXPECT_EQ(got.gpu_act_blocks, wanted.gpu_act_blocks);
  EXPECT_EQ(got.gpu_kv_blocks, wanted.gpu_kv_blocks);
  EXPECT_EQ(got.executor, wanted.executor);
  EXPECT_EQ(got.iteration, wanted.iteration);
  EXPECT_EQ(got.prompt_tokens, wanted.prompt_tokens);
  EXPECT_EQ(got.generated_tokens, wanted.generated_tokens);
  EXPECT_EQ(got.preemptions, wanted.preemptions);
  EXPECT_EQ(got.elapsed, wanted.elapsed);
  EXPECT_EQ(got.totals.kv, wanted.totals.kv);
  EXPECT_EQ(got.totals.compute_wait_ns, wanted.totals.compute_wait_ns);
  EXPECT_EQ(got.predicted.decoding, wanted.predicted.decoding);
  EXPECT_EQ(got.predicted.measured.n, wanted.predicted.measured.n);
  ASSERT_EQ(got.requests.size(), wanted.requests.size());
  for (std::size_t i = 0; i < got.requests.size(); ++i) {
    EXPECT_EQ(got.requests[i].request, wanted.requests[i].request);
    EXPECT_EQ(got.requests[i].answer, wanted.requests[i].answer);
    EXPECT_EQ(got.requests[i].prompt_values, wanted.requests[i].prompt_values);
    EXPECT_EQ(got.requests[i].running, wanted.requests[i].running);
    EXPECT_EQ(got.requests[i].stored, wanted.requests[i].stored);
    EXPECT_EQ(got.requests[i].token_blocks, wanted.requests[i].token_blocks);
    EXPECT_EQ(got.requests[i].blocks, wanted.requests[i].blocks);
    EXPECT_EQ(got.requests[i].lost, wanted.requests[i].lost);
  }
  EXPECT_EQ(got.search, wanted.search);
  ASSERT_EQ(got.answers.size(), wanted.answers.size());
  for (std::size_t i = 0; i < got.answers.size(); ++i) {
    EXPECT_EQ(got.answers[i].request, wanted.answers[i].request);
    EXPECT_EQ(got.answers[i].prompt_ran, wanted.answers[i].prompt_ran);
    EXPECT_EQ(got.answers[i].prompt_values, wanted.answers[i].prompt_values);
    EXPECT_EQ(got.answers[i].values, wanted.answers[i].values);
  }
}

class JournalFile : public testing::Test {
 protected:
  std::string written(const Journal& journal) {
    write_journal(folder_.path(), journal);
    return testing_support::read_file(path());
  }
  std::filesystem::path path() const { return folder_.path() / "journal"; }
  std::string refusal() {
    try {
      take_journal(folder_.path());
    } catch (const Failure& failure) {
      return failure.what();
    }
    return "";
  }

  testing_support::TempDirectory folder_;
};

TEST_F(JournalFile, WhatIsTakenIsWhatWasWrittenAndIsGone) {
  EXPECT_FALSE(journal_exists(folder_.path()));
  written(a_journal());
  ASSERT_TRUE(journal_exists(folder_.path()));
  expect_same(take_journal(folder_.path()), a_journal());
  EXPECT_FALSE(journal_exists(folder_.path())) << "it would be believed again when it is not true";
}

// 1,000 tokens more, each of 5 bytes in CBOR.
TEST_F(JournalFile, AnAnswersTokensStandInItOnce) {
  Journal journal = a_journal();
  const std::size_t before = written(journal).size();
  journal.requests[0].answer.insert(journal.requests[0].answer.end(), 1000, 1'000'000);
  const std::size_t grown = written(journal).size() - before;
  EXPECT_GE(grown, 5000u);
  EXPECT_LT(grown, 5100u);
}

TEST_F(JournalFile, CutAnywhereItIsRefused) {
  const std::string whole = written(a_journal());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    testing_support::write_file(path(), whole.substr(0, size));
    EXPECT_NE(refusal().find("torn"), std::string::npos) << size;
  }
  testing_support::write_file(path(), whole + "x");
  EXPECT_NE(refusal().find("torn"), std::string::npos);
}

TEST_F(JournalFile, ADamagedByteIsRefusedWherever) {
  const std::string whole = written(a_journal());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    std::string damaged = whole;
    damaged[i] = static_cast<char>(damaged[i] ^ 0x10);
    testing_support::write_file(path(), damaged);
    EXPECT_NE(refusal(), "") << "byte " << i;
  }
}

TEST_F(JournalFile, WhereItCannotBeWrittenThatIsSaid) {
  std::filesystem::create_directories(path() / "in the way");
  try {
    write_journal(folder_.path(), a_journal());
    ADD_FAILURE() << "it was written";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::busy);
    EXPECT_NE(std::string(failure.what()).find("journal cannot be written"), std::string::npos);
  }
}

TEST_F(JournalFile, OfOtherWorkItIsRefusedWithWhatDiffers) {
  const auto refused = [](auto change) {
    Journal now = a_journal();
    change(now);
    try {
      check_same_work(a_journal(), now);
    } catch (const Failure& failure) {
      return std::string(failure.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused([](Journal&) {}), "");
  EXPECT_NE(refused([](Journal& j) { j.run_id = "f"; }).find("another run"), std::string::npos);
  EXPECT_NE(refused([](Journal& j) { j.build = "f"; }).find("another build"), std::string::npos);
  EXPECT_NE(refused([](Journal& j) { j.model = "f"; }).find("another model"), std::string::npos);
  EXPECT_NE(refused([](Journal& j) { j.input = "f"; }).find("another input"), std::string::npos);
  EXPECT_NE(refused([](Journal& j) { ++j.pool_epoch; }).find("block pool"), std::string::npos);
  EXPECT_NE(refused([](Journal& j) { ++j.partition.act_blocks; }).find("ACT"), std::string::npos);
  EXPECT_NE(refused([](Journal& j) { --j.partition.kv_blocks; }).find("KV"), std::string::npos);
}

TEST(LostBlocks, CostTheirOwnRowsAndNoOthers) {
  Journal journal = a_journal();
  journal.requests.push_back({.request = {12},
                              .answer = {3},
                              .running = true,
                              .stored = 5,
                              .blocks = {{BlockKind::kv, Place::host, BlockId{2}}}});
  lose_blocks(journal, Lost::device);
  EXPECT_EQ(journal.requests[0].lost, (std::vector<std::uint32_t>{1, 3})) << "it lay on the device";
  EXPECT_EQ(journal.requests[0].blocks.size(), 4u);
  EXPECT_EQ(journal.requests[0].stored, 60);
  lose_blocks(journal, Lost::device);
  EXPECT_EQ(journal.requests[0].lost.size(), 2u) << "it is lost once";
  EXPECT_EQ(journal.requests[0].answer, a_journal().requests[0].answer);
  EXPECT_TRUE(journal.requests[0].running);
  EXPECT_EQ(journal.requests[2].blocks.size(), 1u);
  EXPECT_EQ(journal.requests[2].stored, 5);
  lose_blocks(journal, Lost::everything);
  EXPECT_TRUE(journal.requests[2].blocks.empty());
  EXPECT_TRUE(journal.requests[0].lost.empty());
  EXPECT_EQ(journal.requests[2].stored, 0);
}

}  // namespace
}  // namespace poise
