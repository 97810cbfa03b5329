// What a run's balance is said to be, on reports made by hand: 10 iterations of one layer order each.

#include "planner/record/balance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "common/files/json.h"

namespace poise {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr BlockSizes kSizes{.kv_row = {8192}, .act_row = {4096}};
constexpr std::uint64_t kMs = 1'000'000;

// Times of an iteration in ms; bytes and blocks of it.
struct Reported {
  std::uint64_t link = 0, compute = 0, back = 0;
  std::uint64_t for_weights = 0, for_blocks = 0, for_rows = 0, for_buffers = 0;
  std::uint64_t host = 0, for_host = 0;
  std::uint64_t weights = 0, kv = 0, act = 0;
  std::uint32_t kv_blocks = 0, act_blocks = 0;
  double wall = 100;
  std::size_t mini_batches = 4;
  int iterations = 10;
  bool decodes = true;
};

messages::LayerDoneT report_of(const Reported& told) {
  messages::LayerDoneT done;
  done.copy_in = std::make_unique<messages::StreamReport>(told.weights + told.kv + told.act,
                                                          told.link * kMs, told.for_buffers * kMs);
  done.compute = std::make_unique<messages::StreamReport>(
      0, told.compute * kMs, (told.for_weights + told.for_blocks + told.for_rows) * kMs);
  done.copy_out = std::make_unique<messages::StreamReport>(0, told.back * kMs, 0);
  done.link = std::make_unique<messages::LinkBytes>(told.weights, told.kv, told.act, 0);
  done.waits = std::make_unique<messages::ComputeWaits>(told.for_weights * kMs,
                                                        told.for_blocks * kMs, told.for_rows * kMs);
  if (told.host > 0) {
    done.host = std::make_unique<messages::StreamReport>(1000, told.host * kMs, 0);
    done.host_wait_ns = told.for_host * kMs;
    done.host_rows_bytes = 10;
  }
  done.mini_batches.emplace_back(0, told.kv_blocks, told.act_blocks, 8, told.compute * kMs);
  return done;
}

Balance balance_of_run(const Reported& told) {
  Balance balance(kSizes);
  double now = 5;
  for (int i = 0; i < told.iterations; ++i) {
    balance.begin({.number = static_cast<std::uint64_t>(i + 1),
                   .decodes = told.decodes,
                   .mini_batches = told.mini_batches},
                  {now});
    balance.take(report_of(told));
    now += told.wall * 1e-3;
    balance.end({now});
  }
  return balance;
}

std::string said_of(const Reported& told, const BalanceFacts& facts = {}) {
  return words(balance_of_run(told), facts);
}

TEST(Balance, HostCoresAreAThirdSide) {
  const Balance busy = balance_of_run(
      {.link = 60, .compute = 20, .host = 95, .for_host = 70, .weights = 600, .kv = 400});
  const std::string told = words(busy, {});
  EXPECT_THAT(told, HasSubstr("the host cores 95 %"));
  EXPECT_THAT(told, HasSubstr("The host cores are the limit"));
  const auto json = json_of(busy.decode());
  EXPECT_DOUBLE_EQ(json["t_host"].get<double>(), 0.95);
  EXPECT_DOUBLE_EQ(json["host_busy"].get<double>(), 0.95);
  EXPECT_DOUBLE_EQ(json["compute_waits"]["host"].get<double>(), 0.7);
  EXPECT_EQ(json["host_bytes"]["read"], 10'000);
  const Balance both = balance_of_run({.link = 96, .compute = 20, .host = 97, .weights = 600});
  EXPECT_THAT(words(both, {}), HasSubstr("another side are busy"));
  const Balance idle = balance_of_run(
      {.link = 96, .compute = 20, .for_weights = 70, .host = 40, .weights = 600, .kv = 10});
  EXPECT_THAT(words(idle, {}), AllOf(HasSubstr("the host cores 40 %"), HasSubstr("were weights")));
  EXPECT_FALSE(json_of(balance_of_run({.link = 50}).decode()).contains("t_host"));
}

TEST(Balance, AddsUpWhatWasReported) {
  const Balance balance = balance_of_run({.link = 90,
                                          .compute = 30,
                                          .back = 5,
                                          .for_blocks = 55,
                                          .for_buffers = 2,
                                          .kv = 16 * 8192,
                                          .kv_blocks = 1,
                                          .iterations = 20});
  EXPECT_EQ(balance.all().iterations, 20);
  EXPECT_EQ(balance.all().mini_batches, 80);
  EXPECT_NEAR(balance.all().wall.n, 2, 1e-9);
  EXPECT_NEAR(balance.all().pcie.n, 1.8, 1e-9);
  EXPECT_NEAR(balance.all().compute.n, 0.6, 1e-9);
  EXPECT_NEAR(balance.all().for_blocks.n, 1.1, 1e-9);
  EXPECT_NEAR(balance.all().mean_f_b(), 3, 1e-9) << "90 ms to load, 30 to compute";
  EXPECT_EQ(balance.last().size(), Balance::kLast);
  EXPECT_EQ(balance.last().back().kind.number, 20u);
  const auto json = json_of(balance, {});
  EXPECT_EQ(json["whole"]["link_busy"], 0.9);
  EXPECT_EQ(json["generating"]["compute_waits"]["blocks"], 1.1);
  EXPECT_NEAR(json["whole"]["link_without_orders"].get<double>(), 0.08, 1e-9);
  EXPECT_NEAR(json["whole"]["compute_without_orders"].get<double>(), 0.15, 1e-9);
  EXPECT_EQ(json["last"].size(), Balance::kLast);
  EXPECT_EQ(json["last"][0]["t_pcie"], 0.09);
}

TEST(Balance, FbIsOneWhereBothTakeAsLongAndRisesEitherWay) {
  EXPECT_EQ(f_b({2}, {2}), 1);
  EXPECT_EQ(f_b({6}, {2}), 3);
  EXPECT_EQ(f_b({2}, {6}), 3);
  EXPECT_EQ(f_b({2}, {0}), 0);
  // Weights share the link: of 80 ms, half the bytes are the mini-batch's.
  const BalanceSums sums = balance_of(
      report_of({.link = 80, .compute = 20, .weights = 16 * 8192, .kv = 16 * 8192, .kv_blocks = 1}),
      kSizes);
  EXPECT_NEAR(sums.mean_f_b(), 2, 1e-9);
}

TEST(Balance, IterationsWithPromptsAreNotCountedAsGenerating) {
  messages::IterationT tables;
  tables.mini_batches.push_back(std::make_unique<messages::MiniBatchT>());
  tables.mini_batches[0]->sequences.emplace_back(1, 10, 1, 0, 0);
  EXPECT_TRUE(kind_of(tables).decodes);
  tables.mini_batches[0]->sequences.emplace_back(2, 0, 30, 1, 1);
  EXPECT_FALSE(kind_of(tables).decodes);
  tables.mini_batches[0]->sequences.back() = {1, 10, 1, 0, 0};
  tables.mini_batches[0]->samples.push_back(std::make_unique<messages::SampleT>());
  tables.mini_batches[0]->samples[0]->step = 3;
  EXPECT_TRUE(kind_of(tables).decodes);
  tables.mini_batches[0]->samples[0]->step = 0;  // the prompt's own
  EXPECT_FALSE(kind_of(tables).decodes);
  EXPECT_EQ(balance_of_run({.link = 50, .decodes = false}).decode().iterations, 0);
}

TEST(Balance, RowsThatAreComputedAgainSinceTheyAreKeptNowhereBelongToGenerating) {
  messages::IterationT tables;
  tables.mini_batches.push_back(std::make_unique<messages::MiniBatchT>());
  messages::MiniBatchT& batch = *tables.mini_batches[0];
  const auto add_entry = [&](messages::Place place) {
    batch.entries.emplace_back(messages::Where::RegeneratedKv, messages::Kind::Kv, place, 0, 0, 0);
  };
  add_entry(messages::Place::Nowhere);
  add_entry(messages::Place::Nowhere);
  add_entry(messages::Place::Host);
  batch.sequences.emplace_back(1, 0, 2 * kBlockTokens, 0, 0);
  batch.sequences.emplace_back(1, 2 * kBlockTokens + 3, 1, 2 * kBlockTokens, 0);
  EXPECT_TRUE(kind_of(tables).decodes);
  batch.sequences[0] = {1, 0, 2 * kBlockTokens + 1, 0, 0};  // into the block that is kept
  EXPECT_FALSE(kind_of(tables).decodes);
  // A piece of a prompt: nothing is kept of it either, and nothing is sampled yet.
  batch.sequences = {{1, 0, 2 * kBlockTokens, 0, 0}};
  EXPECT_FALSE(kind_of(tables).decodes);
  batch.sequences = {{1, 0, kBlockTokens, 0, 0}, {1, kBlockTokens, 9, kBlockTokens, 0}};
  EXPECT_FALSE(kind_of(tables).decodes);
}

TEST(BalanceWords, OfABusyLinkThatBringsKvAdviseMoreAct) {
  EXPECT_THAT(said_of({.link = 96, .compute = 31, .for_blocks = 60, .kv = 900, .act = 100}),
              AllOf(HasSubstr("While generating, the link was busy 96 % of the time, the GPU 31 %"),
                    HasSubstr("More ACT would help: 90 % of what it carried were KV blocks")));
}

TEST(BalanceWords, OfABusyLinkThatBringsNoKvSayMoreActDoesNotHelp) {
  EXPECT_THAT(said_of({.link = 96, .compute = 31, .for_blocks = 60, .weights = 100, .act = 900}),
              HasSubstr("More ACT would not help: all context that crosses is ACT already"));
  EXPECT_THAT(said_of({.link = 96, .compute = 31, .kv = 900}, {.act_is_smaller = false}),
              HasSubstr("More ACT would not help: with this model an ACT block is no smaller"));
}

TEST(BalanceWords, OfABusyLinkThatBringsWeightsAdviseMoreRequestsWhereThereAreAny) {
  const Reported told{.link = 96, .compute = 31, .for_weights = 60, .weights = 700, .kv = 300};
  EXPECT_THAT(
      said_of(told, {.more_requests = MoreRequests::possible}),
      AllOf(HasSubstr("70 % of what it carried were weights"), HasSubstr("--max-num-seqs")));
  EXPECT_THAT(said_of(told, {.more_requests = MoreRequests::none}),
              AllOf(HasSubstr("no more requests"), Not(HasSubstr("--max-num-seqs"))));
  EXPECT_THAT(said_of(told, {.more_requests = MoreRequests::slower}),
              AllOf(HasSubstr("this few requests at a time are done sooner"),
                    Not(HasSubstr("--max-num-seqs"))));
}

TEST(BalanceWords, OfABusyGpuAdviseLessActWhereThereIsAny) {
  EXPECT_THAT(
      said_of({.link = 50, .compute = 97, .act = 900, .act_blocks = 9}),
      AllOf(HasSubstr("link was busy 50 %"), HasSubstr("More ACT would not help, less would")));
  EXPECT_THAT(
      said_of({.link = 50, .compute = 97, .kv = 900, .kv_blocks = 9}, {.device = "CPU device"}),
      AllOf(HasSubstr("the CPU device 97 %"), HasSubstr("no part of it is for ACT blocks")));
}

TEST(BalanceWords, OfBothBusySayThatNothingIsToBeWon) {
  for (const auto& [link, compute] : {std::pair{95u, 92u}, {92u, 95u}}) {
    EXPECT_THAT(said_of({.link = link, .compute = compute, .kv = 500, .act = 500, .act_blocks = 5}),
                HasSubstr("Both sides are busy: neither more ACT nor less would help"));
  }
}

TEST(BalanceWords, OfNeitherBusySayWhy) {
  EXPECT_THAT(said_of({.link = 40, .compute = 50, .for_blocks = 10}),
              HasSubstr("40 % of the time there was no order to work on"));
  EXPECT_THAT(said_of({.link = 40, .compute = 50, .for_blocks = 10},
                      {.more_requests = MoreRequests::possible}),
              HasSubstr("More requests at a time would make that share smaller"));
  EXPECT_THAT(
      said_of({.link = 40, .compute = 50, .for_blocks = 10}, {.more_requests = MoreRequests::none}),
      HasSubstr("There were no more requests"));
  EXPECT_THAT(said_of({.link = 50, .compute = 50, .for_blocks = 49, .mini_batches = 1}),
              HasSubstr("more requests, or smaller mini-batches"));
  EXPECT_THAT(said_of({.link = 50, .compute = 50, .for_blocks = 49, .mini_batches = 1},
                      {.more_requests = MoreRequests::slower}),
              AllOf(HasSubstr("computes: smaller mini-batches (--mini-batch-tokens) would"),
                    Not(HasSubstr("more requests"))));
  EXPECT_THAT(
      said_of({.link = 60,
               .compute = 50,
               .for_weights = 9,
               .for_blocks = 40,
               .for_buffers = 30,
               .kv = 1 << 20,
               .kv_blocks = 2}),
      AllOf(HasSubstr("They took turns: 40 % of the time computation waited for blocks, 30 % "
                      "the link waited for buffers"),
            HasSubstr("F_b")));
}

TEST(BalanceWords, OfASmallRunClaimNothing) {
  EXPECT_THAT(said_of({.link = 96, .compute = 31, .kv = 900, .iterations = 2}),
              AllOf(HasSubstr("2 iterations in 0.20 s are too little"), Not(HasSubstr("ACT"))));
  EXPECT_THAT(words(Balance(kSizes), {}), HasSubstr("0 iterations"));
}

TEST(BalanceWords, AreNotOfTheFirstIterationInWhichEverythingStarts) {
  Balance balance(kSizes);
  balance.begin({.number = 1, .mini_batches = 4}, {0});
  balance.take(report_of({.link = 1900, .compute = 1800}));
  balance.end({2});
  for (int i = 1; i <= 5; ++i) {
    balance.begin({.number = 1u + static_cast<unsigned>(i), .mini_batches = 4}, {1.9 + 0.1 * i});
    balance.take(report_of({.link = 10, .compute = 95}));
    balance.end({2 + 0.1 * i});
  }
  EXPECT_EQ(balance.all().iterations, 6);
  EXPECT_EQ(balance.settled().iterations, 5);
  EXPECT_THAT(words(balance, {}), HasSubstr("The link was busy 10 % of the time, the GPU 95 %"));
}

TEST(BalanceWords, OfStoresThatFillTheLinkSaySo) {
  EXPECT_THAT(said_of({.link = 20, .compute = 40, .back = 95, .for_rows = 50, .decodes = false}),
              AllOf(HasSubstr("The link was busy 95 %"), HasSubstr("new rows on their way")));
}

}  // namespace
}  // namespace poise
