// What HuggingFace made of the same strings and ids: tests/golden/make_tokenizer_golden.py wrote
// it.

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/files/json.h"
#include "common/trouble.h"
#include "planner/tokenizer/detokenizer.h"
#include "planner/tokenizer/tokenizer.h"
#include "planner/tokenizer/unicode.h"
#include "tests/support/source_folder.h"

namespace poise {
namespace {

using Ids = std::vector<TokenId>;

const std::filesystem::path kGolden = source_folder() / "tests" / "golden" / "tokenizer";

const nlohmann::json& golden() {
  static const nlohmann::json json = nlohmann::json::parse(std::ifstream(kGolden / "golden.json"));
  return json.at("cases");
}

// How many cases make_tokenizer_golden.py writes at least for a vocabulary.
struct Floor {
  std::size_t encode, decode;
};
Floor floor_of(std::string_view vocabulary) {
  const bool large = vocabulary == "opt" || vocabulary == "llama" || vocabulary == "mixed";
  return large ? Floor{300, 100} : Floor{120, 60};
}

class TokenizerGolden : public testing::TestWithParam<const char*> {
 protected:
  const nlohmann::json& cases() const { return golden().at(GetParam()); }
  Tokenizer tokenizer_ =
      Tokenizer::load(kGolden / GetParam(), golden().at(GetParam()).at("rows").get<std::int64_t>());
};

TEST_P(TokenizerGolden, EveryStringEncodesToHuggingFacesIds) {
  ASSERT_GE(cases().at("encode").size(), floor_of(GetParam()).encode);
  for (const auto& one : cases().at("encode")) {
    const auto text = one.at("text").get<std::string>();
    EXPECT_EQ(tokenizer_.encode(text), one.at("ids").get<Ids>()) << one.at("text");
    EXPECT_EQ(tokenizer_.encode(text, false), one.at("plain").get<Ids>()) << one.at("text");
  }
}

TEST_P(TokenizerGolden, EveryListOfIdsDecodesToHuggingFacesText) {
  ASSERT_GE(cases().at("decode").size(), floor_of(GetParam()).decode);
  for (const auto& one : cases().at("decode")) {
    const Ids ids = one.at("ids").get<Ids>();
    EXPECT_EQ(tokenizer_.decode(ids), one.at("text").get<std::string>()) << one.at("ids");
    EXPECT_EQ(tokenizer_.decode(ids, false), one.at("all").get<std::string>()) << one.at("ids");
  }
}

TEST_P(TokenizerGolden, TextsOfTheDetokenizerAreTheDecodedTextAndWholeCharacters) {
  std::mt19937 random(7);  // the seed
  const auto rows = cases().at("rows").get<TokenId>();
  for (int round = 0; round < 2000; ++round) {
    // Single bytes, ids 0 to 300, make invalid UTF-8 of every kind.
    const TokenId end = round % 2 == 0 ? 300 : rows;
    Ids ids(random() % 12);
    for (TokenId& id : ids) {
      id = static_cast<TokenId>(random() % static_cast<unsigned>(end));
    }
    for (const bool skip : {true, false}) {
      Detokenizer detokenizer(tokenizer_, skip);
      std::string text;
      for (std::size_t n = 0; n < ids.size(); ++n) {
        const std::string part = detokenizer.push(ids[n]);
        ASSERT_EQ(invalid_utf8_at(part), std::nullopt) << "round " << round;
        text += part;
        // What has been given out never changes: a prefix of every longer decoding.
        const Ids so_far(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(n) + 1);
        ASSERT_TRUE(tokenizer_.decode(so_far, skip).starts_with(text)) << "round " << round;
      }
      text += detokenizer.finish();
      ASSERT_EQ(text, tokenizer_.decode(ids, skip)) << "round " << round;
    }
  }
}

TEST_P(TokenizerGolden, ThreadsShareOneTokenizer) {
  std::vector<std::thread> threads;
  std::vector<int> differences(4);
  for (std::size_t t = 0; t < differences.size(); ++t) {
    threads.emplace_back([&, t] {
      const auto& all = cases().at("encode");
      for (std::size_t n = 0; n < all.size(); ++n) {
        const auto& one = all[(n + t * 37) % all.size()];
        differences[t] +=
            tokenizer_.encode(one.at("text").get<std::string>()) != one.at("ids").get<Ids>();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(differences, std::vector<int>(4, 0));
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, TokenizerGolden,
                         testing::Values("opt", "llama", "mixed", "qwen", "llama2", "mistral",
                                         "metaspace"),
                         [](const auto& name) { return std::string(name.param); });

TEST(TokenizerOfOpt, PutsEndOfSentenceInFrontAndKnowsTwoSpecialTokens) {
  const Tokenizer tokenizer = Tokenizer::load(kGolden / "opt", 2048);
  EXPECT_TRUE(tokenizer.adds_bos());
  EXPECT_EQ(tokenizer.bos(), 2);
  EXPECT_EQ(tokenizer.eos(), 2);
  EXPECT_EQ(tokenizer.encode(""), Ids{2});
  EXPECT_EQ(tokenizer.encode("</s><pad>", false), (Ids{2, 1}));
  for (TokenId id = 0; id < 2048; ++id) {
    EXPECT_EQ(tokenizer.is_special(id), id == 1 || id == 2) << id;
  }
  for (const char* text : {"<s>", "<unk>", "madeupword0001"}) {
    EXPECT_GT(tokenizer.encode(text, false).size(), 1u) << text;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  }
}

TEST(TokenizerOfOpt, IdsWithoutATokenDecodeToNothing) {
  const Tokenizer tokenizer = Tokenizer::load(kGolden / "opt", 50000);
  const auto size = static_cast<TokenId>(tokenizer.size());
  const Ids word = tokenizer.encode("word", false);
  Ids ids{size, 40000, -1};
  ids.insert(ids.end(), word.begin(), word.end());
  ids.push_back(INT32_MAX);
  EXPECT_EQ(tokenizer.decode(ids), "word");
  EXPECT_EQ(tokenizer.token_text(size), "");
  EXPECT_FALSE(tokenizer.is_special(40000));
}

TEST(TokenizerOfOpt, ATokenThatIsHalfACharacterShowsAsReplacementCharacter) {
  const Tokenizer tokenizer = Tokenizer::load(kGolden / "opt", 2048);
  const Ids ids = tokenizer.encode("\U0010FFFD", false);  // no word of the vocabulary: four bytes
  ASSERT_EQ(ids.size(), 4u);
  EXPECT_EQ(tokenizer.token_text(ids[0]), "\uFFFD");
  EXPECT_EQ(tokenizer.token_bytes(ids[0]), "\xF4");

  Detokenizer detokenizer(tokenizer);
  EXPECT_EQ(detokenizer.push(ids[0]), "");
  EXPECT_EQ(detokenizer.push(ids[1]), "");
  EXPECT_EQ(detokenizer.push(ids[2]), "");
  EXPECT_EQ(detokenizer.push(ids[3]), "\U0010FFFD");
  EXPECT_EQ(detokenizer.finish(), "");
  detokenizer.push(ids[0]);
  detokenizer.push(ids[1]);
  EXPECT_EQ(detokenizer.finish(), "\uFFFD");
  EXPECT_EQ(detokenizer.finish(), "");
}

// Of llama2 and mistral: bytes are the ids 3 to 258.
constexpr TokenId byte_fallback(unsigned char byte) { return 3 + byte; }

TEST(TokenizerOfText, ARunOfBytesIsWholeCharactersOrAllReplacements) {
  const Tokenizer tokenizer = Tokenizer::load(kGolden / "llama2", 50000);
  const TokenId word = tokenizer.encode("the", false).front();
  Detokenizer detokenizer(tokenizer);
  EXPECT_EQ(detokenizer.push(byte_fallback('A')), "");
  EXPECT_EQ(detokenizer.held_back(), "A");
  EXPECT_EQ(detokenizer.push(byte_fallback(0xC3)), "");
  EXPECT_EQ(detokenizer.held_back(), "") << "U+FFFD is not yet the text";
  EXPECT_EQ(detokenizer.push(byte_fallback(0xA9)), "");
  EXPECT_EQ(detokenizer.held_back(), "A\u00E9");
  EXPECT_EQ(detokenizer.push(1), "") << "a special token is not there";
  EXPECT_EQ(detokenizer.push(word), "A\u00E9 the");
  EXPECT_EQ(detokenizer.push(byte_fallback('A')) + detokenizer.push(byte_fallback(0xFF)), "");
  EXPECT_EQ(detokenizer.finish(), "\uFFFD\uFFFD");
  EXPECT_EQ(detokenizer.push(word), "the") << "it begins anew, without the first space";
  EXPECT_EQ(tokenizer.token_text(byte_fallback(0xC3)), "\uFFFD");
  EXPECT_EQ(tokenizer.token_text(word), "the");
}

TEST(TokenizerOfText, OnlyATextOfItsOwnLosesItsFirstSpace) {
  for (const char* name : {"llama2", "mistral", "metaspace"}) {
    const Tokenizer tokenizer = Tokenizer::load(kGolden / name, 50000);
    const TokenId word = tokenizer.encode("the", false).front();
    EXPECT_EQ(tokenizer.decode(Ids{word, word}), "the the") << name;
    EXPECT_EQ(Detokenizer(tokenizer).push(word), "the") << name;
    EXPECT_EQ(Detokenizer(tokenizer, true, /*continues=*/true).push(word), " the") << name;
  }
}

TEST(TokenizerOfText, ASpaceGoesBeforeEachStretchOrTheFirstAlone) {
  const Tokenizer each = Tokenizer::load(kGolden / "llama2", 50000);
  EXPECT_EQ(each.decode(each.encode("the<s>the", false), false), "the<s> the");
  const Tokenizer first = Tokenizer::load(kGolden / "mistral", 50000);
  EXPECT_EQ(first.decode(first.encode("the[INST]the", false), false), "the[INST]the");
  EXPECT_EQ(first.decode(first.encode("[INST]the", false), false), "[INST]the");
}

TEST(TokenizerText, TextThatIsNotUtf8IsRefused) {
  const Tokenizer tokenizer = Tokenizer::load(kGolden / "opt", 2048);
  for (const char* text : {"ab\xFF", "ab\xC3", "ab\xED\xA0\x80", "ab\xF4\x90\x80\x80", "ab\xC0\x80",
                           "ab\xE0\x80\x80"}) {
    try {
      tokenizer.encode(text);
      ADD_FAILURE() << text;
    } catch (const Failure& failure) {
      EXPECT_STREQ(failure.what(), "the text is not UTF-8 at byte 2");
    }
  }
}

TEST(TokenizerText, RunsOfAnyLengthEncodeInNearlyLinearTime) {
  // Were it quadratic, this would take hours.
  for (const char* name : {"opt", "llama", "mixed", "qwen", "llama2", "mistral", "metaspace"}) {
    const Tokenizer tokenizer = Tokenizer::load(kGolden / name, 50000);
    for (const char* unit :
         {"a", "^", " ", "\n", "1", "'", "한", "\u0301", " a", "</s", "<mask>"}) {
      std::string text;
      while (text.size() < 300000) {
        text += unit;
      }
      const Ids ids = tokenizer.encode(text, false);
      if (std::string(name) == "opt") {
        EXPECT_EQ(tokenizer.decode(ids), text);
      }
      // A space may have come before each stretch between added tokens.
      EXPECT_LE(ids.size(), text.size() * (std::string(name) == "llama2" ? 2 : 1) + 1);
    }
  }
}

}  // namespace
}  // namespace poise
