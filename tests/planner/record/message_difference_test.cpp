// Each field that describes work is compared, by whatever name the schema gives it; a changed one is named.

#include "planner/record/message_difference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/messages_bfbs_generated.h"

namespace poise {
namespace {

template <typename Table>
std::vector<std::uint8_t> packed_message(Table table, const std::string& run_id = "run") {
  messages::MessageT message;
  message.run_id = run_id;
  message.body.Set(std::move(table));
  flatbuffers::FlatBufferBuilder builder;
  messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, &message));
  return {builder.GetBufferPointer(), builder.GetBufferPointer() + builder.GetSize()};
}

std::string difference_text(const std::vector<std::uint8_t>& a, const std::vector<std::uint8_t>& b,
                            Compared compared = Compared::work) {
  const auto found = MessageComparison(compared).first_difference(*messages::GetMessage(a.data()),
                                                                  *messages::GetMessage(b.data()));
  return found ? found->path + ": " + found->a + " | " + found->b : "";
}

messages::IterationT some_tables() {
  messages::IterationT tables;
  tables.iteration = 12;
  tables.pool_epoch = 3;
  for (std::uint32_t id = 0; id < 2; ++id) {
    auto batch = std::make_unique<messages::MiniBatchT>();
    batch->id = id;
    batch->sequences.emplace_back(7, 30, 1, 0, 0);
    batch->tokens = {5};
    batch->entries.emplace_back(messages::Where::LoadedKv, messages::Kind::Kv,
                                messages::Place::Host, 0, 1, 2);
    for (std::uint32_t i = 0; i < 6; ++i) {
      batch->loads.emplace_back(messages::Kind::Kv, messages::Place::Host, 16, 1, i, 10 + i);
    }
    auto sample = std::make_unique<messages::SampleT>();
    sample->temperature = 0.5f;
    sample->prompt_targets = {1, 2, 3};
    batch->samples.push_back(std::move(sample));
    tables.mini_batches.push_back(std::move(batch));
  }
  return tables;
}

std::string change_of_tables(const std::function<void(messages::IterationT&)>& change) {
  messages::IterationT a = some_tables(), b = some_tables();
  change(b);
  return difference_text(packed_message(std::move(a)), packed_message(std::move(b), "another run"));
}

TEST(MessageComparison, EqualMessagesHaveNoDifference) {
  EXPECT_EQ(change_of_tables([](auto&) {}), "");
}

TEST(MessageComparison, AChangedFieldIsNamedWithBothValues) {
  EXPECT_EQ(change_of_tables([](auto& tables) { tables.iteration = 13; }), "iteration: 12 | 13");
  EXPECT_EQ(change_of_tables([](auto& tables) {
              tables.mini_batches[1]->loads[4] = {
                  messages::Kind::Kv, messages::Place::Host, 16, 1, 4, 23};
            }),
            "mini_batches[1].loads[4].first_slot: 14 | 23");
  EXPECT_EQ(
      change_of_tables([](auto& tables) {
        tables.mini_batches[0]->entries[0] = {
            messages::Where::RegeneratedKv, messages::Kind::Kv, messages::Place::Host, 0, 1, 2};
      }),
      "mini_batches[0].entries[0].where: LoadedKv | RegeneratedKv");
  EXPECT_EQ(change_of_tables([](auto& tables) { tables.mini_batches[0]->tokens = {6}; }),
            "mini_batches[0].tokens[0]: 5 | 6");
  EXPECT_EQ(
      change_of_tables([](auto& tables) { tables.mini_batches[0]->samples[0]->generate = false; }),
      "mini_batches[0].samples[0].generate: true | false");
  EXPECT_EQ(
      change_of_tables([](auto& tables) { tables.mini_batches[1]->samples[0]->temperature = 1; }),
      "mini_batches[1].samples[0].temperature: 0.5 | 1");
  EXPECT_EQ(
      change_of_tables([](auto& tables) { tables.mini_batches[1]->samples[0]->seed = ~0ull; }),
      "mini_batches[1].samples[0].seed: 0 | 18446744073709551615");
}

TEST(MessageComparison, AListThatIsLongerDiffersInItsLengthOrInTheFirstElementThatDoes) {
  EXPECT_EQ(change_of_tables([](auto& tables) { tables.mini_batches[1]->loads.pop_back(); }),
            "mini_batches[1].loads: 6 of them | 5 of them");
  EXPECT_EQ(change_of_tables([](auto& tables) { tables.mini_batches[1]->loads.clear(); }),
            "mini_batches[1].loads: 6 of them | 0 of them");
  EXPECT_EQ(change_of_tables([](auto& tables) {
              tables.mini_batches[0]->samples[0]->prompt_targets = {1, 9};
            }),
            "mini_batches[0].samples[0].prompt_targets[1]: 2 | 9");
}

TEST(MessageComparison, ResultsAreComparedBitByBit) {
  const auto with_logprob = [](float logprob, bool chosen = true) {
    messages::IterationDoneT done;
    done.results.push_back(std::make_unique<messages::SampleResultT>());
    if (chosen) {
      done.results[0]->chosen = std::make_unique<messages::LogprobRowT>();
      done.results[0]->chosen->top.emplace_back(4, logprob);
    }
    return packed_message(std::move(done));
  };
  EXPECT_EQ(difference_text(with_logprob(-1.5f), with_logprob(-1.5f)), "");
  EXPECT_EQ(difference_text(with_logprob(-1.5f), with_logprob(std::nextafter(-1.5f, 0.0f))),
            "results[0].chosen.top[0].logprob: -1.5 | -1.49999988");
  EXPECT_EQ(difference_text(with_logprob(0.0f), with_logprob(-0.0f)),
            "results[0].chosen.top[0].logprob: 0 | -0");
  EXPECT_EQ(difference_text(with_logprob(1), with_logprob(1, false)),
            "results[0].chosen: there | absent");
}

TEST(MessageComparison, WhatDiffersBetweenTwoRunsOfTheSameWorkIsComparedOnlyIfAskedFor) {
  messages::LayerDoneT a, b;
  a.copy_in = std::make_unique<messages::StreamReport>(100, 5, 6);
  b.copy_in = std::make_unique<messages::StreamReport>(100, 50, 60);
  a.order = 4;
  b.rested_ns = 7;
  a.mini_batches.emplace_back(0, 1, 2, 3, 4);
  b.mini_batches.emplace_back(0, 1, 2, 3, 40);
  b.waits = std::make_unique<messages::ComputeWaits>(1, 2, 3);
  b.spans.emplace_back();
  const auto first = packed_message(messages::LayerDoneT(a));
  const auto second = packed_message(messages::LayerDoneT(b), "another run");
  EXPECT_EQ(difference_text(first, second), "");
  EXPECT_EQ(difference_text(first, second, Compared::everything), "order: 4 | 0");
  a.order = 0;
  EXPECT_EQ(difference_text(packed_message(messages::LayerDoneT(a)), second, Compared::everything),
            "copy_in.busy_ns: 5 | 50");
  b.copy_in = std::make_unique<messages::StreamReport>(101, 50, 60);
  EXPECT_EQ(difference_text(first, packed_message(messages::LayerDoneT(b))),
            "copy_in.bytes: 100 | 101");
  b.copy_in.reset();
  EXPECT_EQ(difference_text(first, packed_message(messages::LayerDoneT(b))),
            "copy_in: there | absent");
  EXPECT_EQ(difference_text(packed_message(messages::AckT{}),
                            packed_message(messages::AckT{}, "another"), Compared::everything),
            "run_id: \"run\" | \"another\"");
}

TEST(MessageComparison, MessagesOfTwoKindsDifferInTheirKind) {
  EXPECT_EQ(difference_text(packed_message(messages::AckT{}), packed_message(messages::ReadyT{})),
            ": Ack | Ready");
}

// A field that is added to the schema is compared without a change here: all are set and changed by reflection.
TEST(MessageComparison, EveryScalarOfEveryTableIsCompared) {
  const auto* schema = reflection::GetSchema(messages::MessageBinarySchema::data());
  const MessageComparison everything(Compared::everything);
  std::size_t changed = 0;
  const auto* bodies = schema->enums()->LookupByKey("poise.messages.Body");
  for (const reflection::EnumVal* body : *bodies->values()) {
    if (body->value() == 0) {
      continue;
    }
    const auto* object =
        schema->objects()->Get(static_cast<flatbuffers::uoffset_t>(body->union_type()->index()));
    for (const reflection::Field* field : *object->fields()) {
      const auto type = field->type()->base_type();
      if (type < reflection::Bool || type > reflection::ULong) {
        continue;
      }
      const auto with_value = [&](bool changes) {
        flatbuffers::FlatBufferBuilder builder;
        builder.ForceDefaults(true);
        const std::size_t size = flatbuffers::GetTypeSize(type);
        const auto begin = builder.StartTable();
        std::uint64_t value = changes ? 1 : 0;
        if (size == 1) {
          builder.AddElement<std::uint8_t>(field->offset(), static_cast<std::uint8_t>(value));
        } else if (size == 2) {
          builder.AddElement<std::uint16_t>(field->offset(), static_cast<std::uint16_t>(value));
        } else if (size == 4) {
          builder.AddElement<std::uint32_t>(field->offset(), static_cast<std::uint32_t>(value));
        } else {
          builder.AddElement<std::uint64_t>(field->offset(), value);
        }
        const flatbuffers::Offset<void> table(builder.EndTable(begin));
        const auto run = builder.CreateString("run");
        messages::MessageBuilder message(builder);
        message.add_run_id(run);
        message.add_body_type(static_cast<messages::Body>(body->value()));
        message.add_body(table);
        messages::FinishMessageBuffer(builder, message.Finish());
        return std::vector<std::uint8_t>(builder.GetBufferPointer(),
                                         builder.GetBufferPointer() + builder.GetSize());
      };
      const auto a = with_value(false), b = with_value(true);
      const auto found = everything.first_difference(*messages::GetMessage(a.data()),
                                                     *messages::GetMessage(b.data()));
      ASSERT_TRUE(found) << object->name()->str() << "." << field->name()->str();
      EXPECT_EQ(found->path, field->name()->str());
      ++changed;
    }
  }
  EXPECT_GT(changed, 50u);
}

}  // namespace
}  // namespace poise
