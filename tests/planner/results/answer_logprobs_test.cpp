#include "planner/results/answer_logprobs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/planner/results/answer_support.h"

namespace poise {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using testing_support::byte_id;
using testing_support::kAb;
using testing_support::kAbc;
using testing_support::kEos;
using testing_support::kEosList;
using testing_support::KeptAnswer;

class AnswerLogprobs : public testing_support::AnswerTest {};

TEST_F(AnswerLogprobs, LogprobsNameTheBestAndTheChosen) {
  Request asked = request(2);
  asked.sampling.logprobs = 2;
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.push(byte_id('x'), {-0.5f, {{byte_id('x'), -0.5f}, {byte_id('y'), -1.5f}}});
  answer.push(byte_id('z'), {-3, {{byte_id('x'), -0.25f}, {byte_id('y'), -2}}});
  const json made =
      json::parse(answer.result_line("m"))["response"]["body"]["choices"][0]["logprobs"];
  EXPECT_EQ(made, json::parse(R"({"tokens":["x","z"],"token_logprobs":[-0.5,-3.0],
      "top_logprobs":[{"x":-0.5,"y":-1.5},{"x":-0.25,"y":-2.0,"z":-3.0}],"text_offset":[0,1]})"));
}

TEST_F(AnswerLogprobs, LogprobsOfZeroReportTheChosenAlone) {
  Request asked = request(1);
  asked.sampling.logprobs = 0;
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.push(byte_id('x'), {-0.5f, {}});
  EXPECT_THAT(answer.result_line("m"), HasSubstr(R"("top_logprobs":[{"x":-0.5}])"));
}

TEST_F(AnswerLogprobs, TokensOfEqualTextShareTheHigherValue) {
  Request asked = request(1);
  asked.sampling.logprobs = 3;
  KeptAnswer answer(asked, tokenizer_, kEosList);
  // Lone bytes of characters all show as U+FFFD.
  answer.push(byte_id(0xc4),
              {-4, {{byte_id('x'), -0.5f}, {byte_id(0xc3), -1}, {byte_id(0xe2), -2}}});
  const json made =
      json::parse(answer.result_line("m"))["response"]["body"]["choices"][0]["logprobs"];
  EXPECT_EQ(made["top_logprobs"], json::parse(R"([{"x":-0.5,"�":-1.0}])"));
  EXPECT_EQ(made["token_logprobs"], json::parse("[-4.0]"));
}

TEST_F(AnswerLogprobs, OfThePromptEachTokenHasItsOwnAndTheBestWithRanks) {
  Request asked = request(1);
  asked.prompt = {kEos, byte_id('p'), byte_id('r')};
  asked.sampling.prompt_top = 2;
  // The first is among the two best, which the executor's list leaves out then; the second is not.
  const std::vector<TokenLogprobs> values{{-1, {{byte_id('q'), -0.5f}}},
                                          {-4, {{byte_id('x'), -0.25f}, {byte_id('y'), -2}}}};
  const json wanted = json::array(
      {nullptr,
       {{std::to_string(byte_id('q')), {{"logprob", -0.5}, {"rank", 1}, {"decoded_token", "q"}}},
        {std::to_string(byte_id('p')), {{"logprob", -1.0}, {"rank", 2}, {"decoded_token", "p"}}}},
       {{std::to_string(byte_id('r')),
         {{"logprob", -4.0}, {"rank", nullptr}, {"decoded_token", "r"}}},
        {std::to_string(byte_id('x')), {{"logprob", -0.25}, {"rank", 1}, {"decoded_token", "x"}}},
        {std::to_string(byte_id('y')), {{"logprob", -2.0}, {"rank", 2}, {"decoded_token", "y"}}}}});
  for (const bool chat : {false, true}) {
    asked.chat = chat;
    KeptAnswer answer(asked, tokenizer_, kEosList);
    answer.set_prompt_values(values);
    answer.push(byte_id('x'), {});
    const json body = json::parse(answer.result_line("m"))["response"]["body"];
    EXPECT_EQ((chat ? body : body["choices"][0])["prompt_logprobs"], wanted);
    EXPECT_FALSE((chat ? body["choices"][0] : body).contains("prompt_logprobs"));
  }
}

TEST_F(AnswerLogprobs, ScoresAreOfTheTokensThatWereAskedForAndTellWhichWereTheBest) {
  Request asked = request(0);
  asked.prompt = {kEos, byte_id('p')};
  asked.scored_last = kAb;
  asked.sampling.score_from = 1;
  asked.sampling.prompt_top = 1;
  asked.sampling.return_token_ids = true;
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.set_prompt_values({{-0.5f, {}}, {-2, {{byte_id('q'), -0.25f}}}});
  answer.finish_scoring();
  const json body = json::parse(answer.result_line("m"))["response"]["body"];
  EXPECT_EQ(body["choices"][0]["scores"],
            json::parse(R"({"logprobs":[-0.5,-2.0],"best":[true,false]})"));
  EXPECT_EQ(body["choices"][0]["text"], "");
  EXPECT_EQ(body["choices"][0]["prompt_token_ids"], json({kEos, byte_id('p'), kAb}));
  EXPECT_FALSE(body["choices"][0].contains("prompt_logprobs"));
  EXPECT_EQ(body["usage"]["prompt_tokens"], 3);

  asked.sampling.score_best = asked.sampling.prompt_top = 3;
  KeptAnswer with_best(asked, tokenizer_, kEosList);
  with_best.set_prompt_values({{-0.5f, {{byte_id('x'), -1}, {byte_id('y'), -2}}},
                               {-2, {{byte_id('q'), -0.25f}, {byte_id('r'), -3}}}});
  with_best.finish_scoring();
  const std::string line = with_best.result_line("m");
  EXPECT_THAT(line, HasSubstr(fmt::format(
                        R"("scores":{{"logprobs":[-0.5,-2.0],"best":[true,false],"last":{{"{}":-0.25,"{}":-2.0,"{}":-3.0}}}})",
                        byte_id('q'), kAb, byte_id('r'))));
}

TEST_F(AnswerLogprobs, EchoedLogprobsBeginWithNull) {
  Request asked = request(1);
  asked.prompt = {kEos, byte_id('p'), kAb};
  asked.prompt_text = "pab";
  asked.sampling.echo = true;
  asked.sampling.logprobs = 1;
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.set_prompt_values({{-2, {{byte_id('q'), -1}}}, {-0.5f, {{kAb, -0.5f}}}});
  answer.push(kEos, {-0.125f, {{kEos, -0.125f}}});
  const json made =
      json::parse(answer.result_line("m"))["response"]["body"]["choices"][0]["logprobs"];
  EXPECT_EQ(made, json::parse(R"({"tokens":["</s>","p","ab","</s>"],
      "token_logprobs":[null,-2.0,-0.5,-0.125],
      "top_logprobs":[null,{"q":-1.0,"p":-2.0},{"ab":-0.5},{"</s>":-0.125}],
      "text_offset":[0,4,5,7]})"));
}

TEST_F(AnswerLogprobs, OffsetsCountCharacters) {
  Request asked = request(4);
  asked.sampling.logprobs = 0;
  KeptAnswer answer(asked, tokenizer_, kEosList);
  for (const TokenId token : {kAbc, byte_id(0xc3), byte_id(0xa9), byte_id('x')}) {
    answer.push(token, {-1, {}});
  }
  EXPECT_THAT(answer.result_line("m"), HasSubstr(R"("text_offset":[0,3,4,5])"));
}

TEST_F(AnswerLogprobs, ValuesThatAreNoProbabilityBreakItOff) {
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  for (const TokenLogprobs& value :
       std::vector<TokenLogprobs>{{nan, {}}, {infinity, {}}, {-1, {{5, nan}}}}) {
    Request asked = request();
    asked.sampling.logprobs = 1;
    KeptAnswer answer(asked, tokenizer_, kEosList);
    answer.push(byte_id('x'), value);
    ASSERT_TRUE(answer.finished());
    EXPECT_EQ(answer.reason(), FinishReason::error);

    asked.sampling.echo = true;
    KeptAnswer scored(asked, tokenizer_, kEosList);
    scored.set_prompt_values({value});
    ASSERT_TRUE(scored.finished());
    EXPECT_EQ(scored.reason(), FinishReason::error);
  }
}

TEST_F(AnswerLogprobs, AnImpossibleTokenHasTheValueVllmGivesIt) {
  Request asked = request(1);
  asked.sampling.logprobs = 0;
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.push(byte_id('x'), {-std::numeric_limits<float>::infinity(), {}});
  EXPECT_THAT(answer.result_line("m"), HasSubstr(R"("token_logprobs":[-9999.0])"));
}

TEST_F(AnswerLogprobs, WithoutATokenizerTokensAreNamedByTheirIds) {
  Request asked = request(2);
  asked.sampling.logprobs = 1;
  asked.sampling.return_token_ids = true;
  KeptAnswer answer(asked, nullptr, kEosList);
  answer.push(5, {-0.5f, {{6, -0.25f}}});
  answer.push(7, {-0.5f, {{7, -0.5f}}});
  const json made = json::parse(answer.result_line("m"))["response"]["body"]["choices"][0];
  EXPECT_EQ(made["text"], "");
  EXPECT_EQ(made["token_ids"], (json{5, 7}));
  EXPECT_EQ(made["logprobs"]["tokens"], (json{"token_id:5", "token_id:7"}));
  EXPECT_EQ(made["logprobs"]["top_logprobs"][0],
            json::parse(R"({"token_id:6":-0.25,"token_id:5":-0.5})"));
}

TEST_F(AnswerLogprobs, TokensCanBeNamedByTheirIdsOnRequest) {
  Request asked = request(1);
  asked.sampling.logprobs = 0;
  asked.sampling.tokens_as_ids = true;
  KeptAnswer answer(asked, tokenizer_, kEosList);
  answer.push(byte_id('x'), {-0.5f, {}});
  const std::string line = answer.result_line("m");
  EXPECT_THAT(line, HasSubstr(fmt::format(R"("tokens":["token_id:{}"])", byte_id('x'))));
  EXPECT_THAT(line, HasSubstr(R"("text":"x")"));
}

}  // namespace
}  // namespace poise
