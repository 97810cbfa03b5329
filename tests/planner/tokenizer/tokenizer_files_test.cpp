// How the files of a model directory decide what a tokenizer does. What is expected of OPT's form
// is what `transformers` 5.23 does with the same files.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "planner/tokenizer/bpe.h"
#include "planner/tokenizer/detokenizer.h"
#include "planner/tokenizer/normalizer.h"
#include "tests/planner/tokenizer/tokenizer_directory.h"

namespace poise {
namespace {

using Ids = std::vector<TokenId>;
using Json = nlohmann::json;

// small_tokenizer's vocabulary and merges, with OPT's special tokens, as two files.
void write_opt(TokenizerDirectory& directory) {
  Json vocabulary = small_tokenizer()["model"]["vocab"];
  for (const char* token : {"</s>", "<pad>", "<s>", "<", "/", "s", ">"}) {
    vocabulary[token] = vocabulary.size();
  }
  directory.write_json("vocab.json", vocabulary).write("merges.txt", "#version: 0.2\na b\nab c\n");
}
constexpr TokenId kSlashS = 13, kPad = 14, kFirstFree = 20;
const Ids kSlashSAsText{16, 17, 18, 19};

const Json kNames = {
    {"bos_token", "</s>"}, {"eos_token", "</s>"}, {"unk_token", "</s>"}, {"pad_token", "<pad>"}};

Json with(Json json, const Json& more) {
  json.update(more);
  return json;
}

TEST(VocabularyFiles, WithoutConfigurationNothingIsAddedAndEndOfTextIsSpecial) {
  TokenizerDirectory directory;
  write_opt(directory);
  const Tokenizer tokenizer = directory.load();
  EXPECT_FALSE(tokenizer.adds_bos());
  EXPECT_EQ(tokenizer.encode("ab</s>"), (Ids{11, 16, 17, 18, 19}));
  EXPECT_EQ(tokenizer.encode("a<|endoftext|>b"), (Ids{0, kFirstFree, 1}));
  EXPECT_TRUE(tokenizer.is_special(kFirstFree));
  EXPECT_EQ(directory.load(kFirstFree).bos(), std::nullopt) << "the model has no row for it";
}

TEST(VocabularyFiles, AddBosTokenDecidesAboutBos) {
  TokenizerDirectory directory;
  write_opt(directory);
  directory.write_json("tokenizer_config.json", with(kNames, {{"add_bos_token", true}}));
  EXPECT_EQ(directory.load().encode("ab"), (Ids{kSlashS, 11}));
  EXPECT_EQ(directory.load().encode("ab", false), Ids{11});
  directory.write_json("tokenizer_config.json", with(kNames, {{"add_bos_token", false}}));
  EXPECT_EQ(directory.load().encode("ab"), Ids{11});
  directory.write_json("tokenizer_config.json",
                       with(kNames, {{"add_bos_token", true}, {"add_eos_token", true}}));
  EXPECT_EQ(directory.load().encode("ab"), (Ids{kSlashS, 11, kSlashS}));
  directory.write_json("tokenizer_config.json",
                       with(kNames, {{"add_bos_token", true}, {"bos_token", nullptr}}));
  EXPECT_EQ(directory.load().encode("ab"), Ids{11}) << "there is no BOS to add";
}

TEST(VocabularyFiles, NamesMayBeObjectsWithFlags) {
  TokenizerDirectory directory;
  write_opt(directory);
  const Json named = {{"__type", "AddedToken"}, {"content", "</s>"}, {"lstrip", true},
                      {"normalized", true},     {"rstrip", false},   {"single_word", false}};
  directory.write_json("tokenizer_config.json",
                       {{"bos_token", named}, {"eos_token", named}, {"unk_token", named}});
  EXPECT_EQ(directory.load().encode("ab </s>"), (Ids{11, kSlashS}));
}

TEST(VocabularyFiles, TheSpecialTokensMapOverridesTheConfiguration) {
  TokenizerDirectory directory;
  write_opt(directory);
  directory.write_json("special_tokens_map.json", kNames);
  EXPECT_EQ(directory.load().encode("</s><pad><s>", false), (Ids{kSlashS, kPad, 16, 18, 19}));
  directory.write_json("tokenizer_config.json", {{"bos_token", "<s>"}, {"add_bos_token", true}});
  const Tokenizer tokenizer = directory.load();
  EXPECT_EQ(tokenizer.bos(), kSlashS);
  EXPECT_EQ(tokenizer.encode("<s>"), (Ids{kSlashS, 16, 18, 19}));
}

TEST(VocabularyFiles, AddedTokensFollowTheVocabulary) {
  TokenizerDirectory directory;
  write_opt(directory);
  directory.write_json(
      "tokenizer_config.json",
      with(kNames, {{"additional_special_tokens", {"<extra>"}}, {"image_token", "<s>"}}));
  directory.write_json("added_tokens.json", {{"<2>", kFirstFree + 1}, {"<1>", kFirstFree}});
  const Tokenizer tokenizer = directory.load();
  EXPECT_EQ(tokenizer.encode("<1><2><extra><s>", false),
            (Ids{kFirstFree, kFirstFree + 1, kFirstFree + 2, 15}));
  EXPECT_FALSE(tokenizer.is_special(kFirstFree));
  EXPECT_TRUE(tokenizer.is_special(kFirstFree + 2));
  EXPECT_TRUE(tokenizer.is_special(15));
  EXPECT_EQ(tokenizer.size(), kFirstFree + 3);
}

TEST(VocabularyFiles, AListOfAddedTokensInTheConfigurationIsComplete) {
  TokenizerDirectory directory;
  write_opt(directory);
  directory.write_json("special_tokens_map.json", {{"pad_token", "<s>"}});
  Json pad = added_token(0, "<pad>");
  pad["lstrip"] = true;
  Json fresh = added_token(0, "<new>");
  fresh["special"] = false;
  pad.erase("id"), fresh.erase("id");
  directory.write_json("tokenizer_config.json",
                       {{"bos_token", "</s>"},
                        {"eos_token", "</s>"},
                        {"unk_token", "</s>"},
                        {"added_tokens_decoder",
                         {{std::to_string(kPad), pad}, {std::to_string(kFirstFree), fresh}}}});
  EXPECT_EQ(directory.load().encode("a <pad><new><s>", false),
            (Ids{0, kPad, kFirstFree, 16, 18, 19}));
}

TEST(VocabularyFiles, CarriageReturnsInMergesAndAPrefixSpaceAreUnderstood) {
  TokenizerDirectory directory;
  write_opt(directory);
  directory.write("merges.txt", "#version: 0.2\r\na b\r\nab c\r\n")
      .write_json("tokenizer_config.json", with(kNames, {{"add_prefix_space", true}}));
  EXPECT_EQ(directory.load().encode("abc</s>abc", false), (Ids{6, 12, kSlashS, 6, 12}));
}

TEST(TokenizerJson, WinsOverTheOtherFilesAboutBosToo) {
  TokenizerDirectory directory;
  write_opt(directory);
  directory.write_json("tokenizer_config.json", with(kNames, {{"add_bos_token", true}}));
  EXPECT_TRUE(directory.load().adds_bos());
  Json json = small_tokenizer();
  json["added_tokens"] = {added_token(13, "</s>"), added_token(14, "<pad>")};
  directory.write_json("tokenizer.json", json);
  EXPECT_EQ(directory.load().encode("ab"), Ids{11});
  json["post_processor"] = {{"type", "RobertaProcessing"},
                            {"sep", {"<pad>", 14}},
                            {"cls", {"</s>", 13}},
                            {"trim_offsets", true},
                            {"add_prefix_space", false}};
  directory.write_json("tokenizer.json", json);
  EXPECT_EQ(directory.load().encode("ab"), (Ids{13, 11, 14}));
  EXPECT_EQ(directory.load().encode("ab", false), Ids{11});
}

TEST(TokenizerJson, NamesInTheConfigurationMakeTokensSpecial) {
  TokenizerDirectory directory;
  directory.write_json("tokenizer.json", small_tokenizer())
      .write_json("tokenizer_config.json", {{"bos_token", "ab"}, {"eos_token", "<new>"}});
  const Tokenizer tokenizer = directory.load();
  EXPECT_EQ(tokenizer.bos(), 11);
  EXPECT_EQ(tokenizer.eos(), 13);
  EXPECT_EQ(tokenizer.encode("abc<new>"), (Ids{11, 2, 13}));
  EXPECT_EQ(tokenizer.decode(Ids{11, 2, 13}), "c");
}

TEST(TokenizerJson, PostProcessorsInSequenceWrapOneAnother) {
  TokenizerDirectory directory;
  Json json = small_tokenizer();
  const Json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const Json special = {{"SpecialToken", {{"id", "c"}, {"type_id", 0}}}};
  json["post_processor"] = {
      {"type", "Sequence"},
      {"processors",
       {json["pre_tokenizer"],
        {{"type", "TemplateProcessing"},
         {"single", {special, text, special}},
         {"pair", Json::array()},
         {"special_tokens", {{"c", {{"id", "c"}, {"ids", {2, 3}}, {"tokens", {"c", "d"}}}}}}},
        {{"type", "BertProcessing"}, {"sep", {"a", 0}}, {"cls", {"b", 1}}}}}};
  directory.write_json("tokenizer.json", json);
  EXPECT_EQ(directory.load().encode("ab"), (Ids{1, 2, 3, 11, 2, 3, 0}));
}

TEST(TokenizerJson, FlagsOfAddedTokensAreHonoured) {
  TokenizerDirectory directory;
  Json json = small_tokenizer();
  auto add = [&](const char* content, const char* flag) {
    Json token = added_token(13 + static_cast<int>(json["added_tokens"].size()), content);
    token["special"] = false;
    if (flag != nullptr) {
      token[flag] = true;
    }
    json["added_tokens"].push_back(token);
  };
  add("<l>", "lstrip");       // 13
  add("<r>", "rstrip");       // 14
  add("<w>", "single_word");  // 15
  add("<n>b", "normalized");  // 16
  add("a<n>", nullptr);       // 17
  add("<l><r>", nullptr);     // 18
  directory.write_json("tokenizer.json", json);
  const Tokenizer tokenizer = directory.load();
  const TokenId space = 6;
  EXPECT_EQ(tokenizer.encode("a \t<l> b"), (Ids{0, 13, space, 1}));
  EXPECT_EQ(tokenizer.encode("a <r>\u3000\n b"), (Ids{0, space, 14, 1}));
  EXPECT_EQ(tokenizer.encode("a-<w>-a"), (Ids{0, 8, 15, 8, 0}));
  EXPECT_EQ(tokenizer.encode("<w>"), Ids{15});
  EXPECT_EQ(tokenizer.encode("a<w>"), Ids{0}) << "< w > are no tokens here";
  EXPECT_EQ(tokenizer.encode("<w>\u0301-"), (Ids{8})) << "a mark makes it part of a word";
  EXPECT_EQ(tokenizer.encode("a<n>b"), (Ids{17, 1})) << "those not normalized come first";
  EXPECT_EQ(tokenizer.encode("<n>b"), Ids{16});
  EXPECT_EQ(tokenizer.encode("<l><r>"), Ids{18}) << "the longest at one place";
  EXPECT_EQ(tokenizer.encode("<r>  <l>"), (Ids{14, 13})) << "white space is taken once";
}

TEST(TokenizerJson, MergesArePairsOrStringsAndALaterDuplicateCounts) {
  TokenizerDirectory directory;
  Json json = small_tokenizer();
  json["model"]["vocab"]["bc"] = 13;
  json["model"]["merges"] = Json::array({Json::array({"a", "b"}), Json::array({"b", "c"})});
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("abc"), (Ids{11, 2}));
  json["model"]["merges"] = {"a b", "b c", "a b"};
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("abc"), (Ids{0, 13}));
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("abc"), Ids{12});
}

TEST(TokenizerJson, BytesWithoutATokenVanishOrAreUnknown) {
  TokenizerDirectory directory;
  Json json = small_tokenizer();
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("azzb"), Ids{11});
  json["model"]["unk_token"] = "-";
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("azzb"), (Ids{0, 8, 8, 1}));
  json["model"]["fuse_unk"] = true;
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("azzb"), (Ids{0, 8, 1}));
}

TEST(TokenizerJson, SplitsBehaveAsTheyAreCalled) {
  // The words are seen through whole tokens: with ignore_merges only a whole word is one.
  const std::map<std::string, Ids> expected = {
      {"Isolated", {0, 8, 8, 11}},          // a - - ab
      {"Removed", {0, 11}},                 // a ab
      {"MergedWithPrevious", {13, 8, 11}},  // a- - ab
      {"MergedWithNext", {0, 8, 14}},       // a - -ab
      {"Contiguous", {0, 15, 11}},          // a -- ab
  };
  for (const auto& [behavior, ids] : expected) {
    TokenizerDirectory directory;
    Json json = small_tokenizer();
    for (const auto& [token, id] : {std::pair("a-", 13), {"-ab", 14}, {"--", 15}}) {
      json["model"]["vocab"][token] = id;
    }
    json["model"]["merges"] = Json::array();
    json["model"]["ignore_merges"] = true;
    Json byte_level = json["pre_tokenizer"];
    byte_level["use_regex"] = false;
    for (const bool invert : {false, true}) {
      const Json pattern = invert ? Json{{"Regex", "[^-]+"}} : Json{{"String", "-"}};
      const Json split = {
          {"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", invert}};
      json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}};
      directory.write_json("tokenizer.json", json);
      if (!invert || behavior == "Contiguous" || behavior == "Removed") {
        EXPECT_EQ(directory.load().encode("a--ab"), ids) << behavior << invert;
      }
    }
  }
}

TEST(TokenizerJson, DigitsAreCutOffAloneOrTogether) {
  for (const bool individual : {false, true}) {
    TokenizerDirectory directory;
    Json json = small_tokenizer();
    json["model"]["vocab"]["12"] = 13;
    json["model"]["merges"].push_back("1 2");
    const Json digits = {{"type", "Digits"}, {"individual_digits", individual}};
    json["pre_tokenizer"] = {{"type", "Sequence"},
                             {"pretokenizers", {digits, small_tokenizer()["pre_tokenizer"]}}};
    directory.write_json("tokenizer.json", json);
    EXPECT_EQ(directory.load().encode("ab12"), individual ? (Ids{11, 4, 5}) : (Ids{11, 13}));
  }
}

// Text with byte fallback: a, b, "▁", "ab", "▁ab" and some bytes, as sentencepiece models have them.
Json text_tokenizer() {
  Json json = small_tokenizer();
  json["pre_tokenizer"] = nullptr;
  json["decoder"] = {{"type", "ByteFallback"}};
  json["model"]["vocab"] = {{"<unk>", 0}, {"a", 1},      {"b", 2},      {"▁", 3},     {"ab", 4},
                            {"▁ab", 5},   {"<0xC3>", 6}, {"<0xA9>", 7}, {"<0x0A>", 8}};
  json["model"]["merges"] = {"a b", "▁ ab"};
  json["model"]["unk_token"] = "<unk>";
  json["model"]["byte_fallback"] = true;
  return json;
}

TEST(TokenizerJson, CharactersWithoutATokenFallBackToTheirBytes) {
  TokenizerDirectory directory;
  Json json = text_tokenizer();
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("ab\u00E9\nb"),
            (Ids{4, 6, 7, 8, 2}));
  // A character with a byte that has no token is unknown. It waits for the next known one.
  EXPECT_EQ(directory.load().encode("a\u00E8\n\u00E8b"), (Ids{1, 8, 0, 0, 2}));
  json["model"]["fuse_unk"] = true;
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("a\u00E8\n\u00E8b"),
            (Ids{1, 8, 0, 2}));
  json["model"].erase("unk_token");
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("a\u00E8\n\u00E8b"),
            (Ids{1, 8, 2}));
  json["model"]["byte_fallback"] = false;
  EXPECT_EQ(directory.write_json("tokenizer.json", json).load().encode("a\u00E9\nb"), Ids{4});
}

TEST(TokenizerJson, MetaspacePutsItsMarkForSpacesAndBeforeTheText) {
  const struct {
    const char* scheme;
    bool split;
    Ids text, behind_a_token;
  } cases[] = {{"always", true, {5, 5}, {0, 5}},
               {"first", true, {5, 5}, {0, 4}},
               {"never", false, {4, 5}, {0, 4}}};
  for (const auto& [scheme, split, text, behind_a_token] : cases) {
    TokenizerDirectory directory;
    Json json = text_tokenizer();
    json["added_tokens"] = Json::array({added_token(0, "<unk>")});
    json["pre_tokenizer"] = {
        {"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", scheme}, {"split", split}};
    directory.write_json("tokenizer.json", json);
    EXPECT_EQ(directory.load().encode("ab ab"), text) << scheme;
    EXPECT_EQ(directory.load().encode("<unk>ab"), behind_a_token) << scheme;
    EXPECT_EQ(directory.load().encode(" ab").back(), 5) << scheme << ": no second mark";
  }
}

TEST(TokenizerJson, NormalizersRewriteTextAndNormalizedTokens) {
  TokenizerDirectory directory;
  Json json = text_tokenizer();
  json["normalizer"] = {{"type", "Sequence"},
                        {"normalizers",
                         {{{"type", "Prepend"}, {"prepend", "▁"}},
                          {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}},
                          {{"type", "NFC"}}}}};
  json["added_tokens"] = {added_token(9, "<s>"), added_token(10, "<n>"),
                          added_token(11, "e\u0301")};
  json["added_tokens"][1]["normalized"] = true;
  json["added_tokens"][1]["special"] = false;
  json["added_tokens"][2]["normalized"] = true;
  const Tokenizer tokenizer = directory.write_json("tokenizer.json", json).load();
  EXPECT_EQ(tokenizer.encode("ab ab<s>ab"), (Ids{5, 5, 9, 5}));
  EXPECT_EQ(tokenizer.encode("ab <n>ab"), (Ids{5, 10, 4})) << "its content begins with the mark";
  EXPECT_EQ(tokenizer.encode("ab<n>"), (Ids{5, 0, 0, 0})) << "< n > are unknown";
  EXPECT_EQ(tokenizer.encode("\u00E9"), Ids{11});
  EXPECT_EQ(tokenizer.encode("e\u0301"), Ids{11});
  EXPECT_EQ(tokenizer.encode(""), Ids{}) << "nothing is put before nothing";
  EXPECT_EQ(tokenizer.decode(Ids{4, 10, 11, 9}), "ab▁<n>") << "special ones are left out";
}

TEST(NormalFormC, ComposesOrdersAndLeavesWhatItMust) {
  const struct {
    const char *text, *normal;
  } cases[] = {
      {"plain", "plain"},
      {"e\u0301", "\u00E9"},
      {"\u00E9", "\u00E9"},
      {"a\u0301\u0323", "\u1EA1\u0301"},   // ordered by class first
      {"q\u0307\u0323", "q\u0323\u0307"},  // ordered, nothing to compose
      {"a\u0315\u0300\u05AE\u0300b", "\u00E0\u05AE\u0300\u0315b"},
      {"\u212B\u2126", "\u00C5\u03A9"},  // singletons
      {"\u0958", "\u0915\u093C"},        // never composed
      {"\u1112\u1161\u11AB", "\uD55C"},  // Hangul
      {"\uAC00\u11A8\u11A8", "\uAC01\u11A8"},
      {"\u1112\u1161\u11A7", "\uD558\u11A7"},  // U+11A7 is no tail
      {"\u0301e", "\u0301e"},
      {"\u0344", "\u0308\u0301"},
  };
  for (const auto& [text, normal] : cases) {
    EXPECT_EQ(to_nfc(text), normal) << text;
  }
  std::string marks = "e";
  for (int n = 0; n < 200000; ++n) {
    marks += n % 2 == 0 ? "\u0301" : "\u0323";  // all must be sorted: quadratic would take minutes
  }
  EXPECT_EQ(to_nfc(marks).substr(0, 5), "\u1EB9\u0323");
}

TEST(TokenizerJson, ALinkIntoACacheIsFollowed) {
  TokenizerDirectory cache, directory;
  cache.write_json("blob", small_tokenizer());
  std::filesystem::create_symlink(cache.path() / "blob", directory.path() / "tokenizer.json");
  EXPECT_EQ(directory.load().encode("ab"), Ids{11});
}

TEST(BytePairEncoding, DoesTheMergesInOrderOfRankThenPlace) {
  std::mt19937 random(3);  // the seed
  for (int round = 0; round < 300; ++round) {
    // A random vocabulary over a, b, c: each merge joins two tokens that are there already.
    BpeDescription bpe;
    std::vector<std::string> tokens{"a", "b", "c"};
    std::map<std::string, TokenId> ids{{"a", 0}, {"b", 1}, {"c", 2}};
    for (int n = 0; n < 30; ++n) {
      const std::string left = tokens[random() % tokens.size()];
      const std::string right = tokens[random() % tokens.size()];
      if (left.size() + right.size() <= 12) {
        const auto [entry, fresh] =
            ids.try_emplace(left + right, static_cast<TokenId>(tokens.size()));
        if (fresh) {
          tokens.push_back(left + right);
        }
        bpe.merges.push_back({ids[left], ids[right], entry->second});
      }
    }
    for (std::size_t n = 0; n < tokens.size(); ++n) {
      bpe.vocabulary.emplace_back(tokens[n], static_cast<TokenId>(n));
    }
    const Bpe encoder(bpe);
    for (const std::size_t length : {1, 2, 5, 31, 32, 33, 34, 100}) {
      std::string word(length, ' ');
      std::generate(word.begin(), word.end(), [&] { return "abc"[random() % 3]; });
      // The definition: again and again the best pair of all.
      Ids symbols;
      for (const char c : word) {
        symbols.push_back(c - 'a');
      }
      std::map<std::pair<TokenId, TokenId>, std::size_t> ranks;
      for (std::size_t n = 0; n < bpe.merges.size(); ++n) {
        ranks[{bpe.merges[n].left, bpe.merges[n].right}] = n;
      }
      for (;;) {
        std::size_t best = bpe.merges.size(), place = 0;
        for (std::size_t n = 0; n + 1 < symbols.size(); ++n) {
          const auto rank = ranks.find({symbols[n], symbols[n + 1]});
          if (rank != ranks.end() && rank->second < best) {
            best = rank->second;
            place = n;
          }
        }
        if (best == bpe.merges.size()) {
          break;
        }
        symbols[place] = bpe.merges[best].whole;
        symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(place) + 1);
      }
      for (int time = 0; time < 2; ++time) {  // the second time it knows whole words
        Ids encoded;
        encoder.encode(word, encoded);
        ASSERT_EQ(encoded, symbols) << "round " << round << ", " << word;
      }
    }
  }
}

}  // namespace
}  // namespace poise
