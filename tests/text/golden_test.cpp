// SPDX-License-Identifier: Apache-2.0
// The published encodings of real tokenizers, in full, and what must hold for any text with any of them.
#include <array>
#include <chrono>
#include <map>
#include <thread>

#include "tests/text/tokenizers.h"

namespace rubato::text {
namespace {

const std::array<std::string, 4> folders = {"gpt2-tokenizer", "llama3-style-tokenizer-32k", "stories260k", "stories260k-bf16"};

nlohmann::json golden_cases(const std::string& folder) {
  return nlohmann::json::parse(read_text(data_folder() / folder / "tokenizer_golden.json")).at("cases");
}

class RealTokenizer : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT(GetParam());
    std::unique_ptr<Tokenizer>& loaded = loaded_[GetParam()];  // once for all tests: it takes longer than most of them
    if (loaded == nullptr) loaded = load_data(GetParam());
    tokenizer_ = loaded.get();
    ASSERT_NE(tokenizer_, nullptr);
  }
  static void TearDownTestSuite() { loaded_.clear(); }
  const Tokenizer* tokenizer_ = nullptr;

 private:
  inline static std::map<std::string, std::unique_ptr<Tokenizer>> loaded_;
};

std::string name_of(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}
INSTANTIATE_TEST_SUITE_P(Folders, RealTokenizer, testing::ValuesIn(folders), name_of);

TEST(Golden, byte_level_files_pass_in_full) {
  for (const std::string folder : {"gpt2-tokenizer", "llama3-style-tokenizer-32k"}) {
    SKIP_WITHOUT(folder);
    const auto tokenizer = load_data(folder);
    ASSERT_NE(tokenizer, nullptr);
    const nlohmann::json cases = golden_cases(folder);
    ASSERT_GE(cases.size(), 46u);
    for (const auto& one : cases) {
      const auto text = one.at("text").get<std::string>();
      const auto ids = one.at("ids").get<std::vector<TokenId>>();
      EXPECT_EQ(encode(*tokenizer, text), ids) << folder << ": " << text;
      EXPECT_EQ(encode(*tokenizer, text, SpecialTokens::AsText), ids) << folder << ": " << text;
      EXPECT_EQ(tokenizer->decode(ids), text) << folder;
    }
  }
}

TEST(Golden, byte_fallback_file_passes_in_full) {
  SKIP_WITHOUT("stories260k");
  for (const std::string folder : {"stories260k", "stories260k-bf16"}) {
    const auto tokenizer = load_data(folder);
    ASSERT_NE(tokenizer, nullptr);
    const nlohmann::json cases = golden_cases("stories260k");
    ASSERT_EQ(cases.size(), 22u);
    for (const auto& one : cases) {
      const auto text = one.at("text").get<std::string>();
      const auto ids = one.at("ids").get<std::vector<TokenId>>();
      std::vector<TokenId> encoded = encode(*tokenizer, text);
      EXPECT_EQ(tokenizer->decode(ids), one.at("decoded").get<std::string>());
      // The file has the begin token in front of every text. Asked to add it, encode does so but for the text that brings its
      // own.
      encoded.insert(encoded.begin(), 1);
      EXPECT_EQ(encoded, ids) << text;
      if (ids.size() > 1 && ids[1] == 1) encoded.erase(encoded.begin());
      EXPECT_EQ(encode(*tokenizer, text, SpecialTokens::Parse, BeginToken::AsConfigured), encoded) << text;
    }
  }
}

TEST(Golden, answers_decode_as_the_models_golden_file_has_them) {
  for (const std::string folder : {"stories260k", "stories260k-bf16"}) {
    SKIP_WITHOUT(folder);
    const auto tokenizer = load_data(folder);
    ASSERT_NE(tokenizer, nullptr);
    const nlohmann::json golden = nlohmann::json::parse(read_text(data_folder() / folder / "golden.json"));
    for (const auto& prompt : golden.at("prompts")) {
      EXPECT_EQ(encode(*tokenizer, prompt.at("prompt").get<std::string>(), SpecialTokens::AsText, BeginToken::AsConfigured),
                prompt.at("prompt_token_ids").get<std::vector<TokenId>>());
      Detokenizer detokenizer(*tokenizer);
      std::string text;
      for (const TokenId id : prompt.at("output_token_ids").get<std::vector<TokenId>>()) text += detokenizer.push(id);
      text += detokenizer.finish();
      EXPECT_EQ(text, prompt.at("output_text").get<std::string>());
    }
  }
}

TEST_P(RealTokenizer, random_text_survives_encode_and_decode) {
  constexpr std::uint64_t seed = 20240611;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2000; ++round) {
    const std::string text = random_text(random, 60);
    const std::vector<TokenId> ids = encode(*tokenizer_, text, SpecialTokens::AsText);
    ASSERT_EQ(tokenizer_->decode(ids), text) << "seed " << seed << " round " << round;
    for (const TokenId id : ids) ASSERT_FALSE(tokenizer_->is_special(id));
  }
}

/// What decode means, written the slow way: bytes of all tokens together, blanks dropped in front, then whole characters.
std::string decode_at_once(const Tokenizer& tokenizer, const std::vector<TokenId>& ids, bool drops_blank) {
  std::string bytes;
  for (const TokenId id : ids) bytes += tokenizer.token_bytes(id);
  if (drops_blank && bytes.starts_with(' ')) bytes.erase(0, 1);
  std::string text;
  take_characters(bytes, text);
  return bytes.empty() ? text : text + "\xEF\xBF\xBD";
}

TEST_P(RealTokenizer, streamed_pieces_concatenate_to_the_whole_and_are_each_valid) {
  constexpr std::uint64_t seed = 7;
  std::mt19937_64 random(seed);
  const bool drops_blank = GetParam().starts_with("stories");
  for (int round = 0; round < 2000; ++round) {
    // A third of the ids stem from real text, so that characters split over tokens complete often enough.
    std::vector<TokenId> ids = encode(*tokenizer_, random_text(random, 12), SpecialTokens::AsText);
    const int count = std::uniform_int_distribution<int>(0, 24)(random);
    for (int index = 0; index < count; ++index) {
      ids.push_back(std::uniform_int_distribution<TokenId>(-2, tokenizer_->vocabulary() + 2)(random));
    }
    Detokenizer detokenizer(*tokenizer_, TextStart::Beginning);
    std::string streamed;
    for (const TokenId id : ids) {
      const std::string piece = detokenizer.push(id);
      ASSERT_FALSE(find_invalid_utf8(piece)) << "seed " << seed << " round " << round;
      streamed += piece;
    }
    streamed += detokenizer.finish();
    ASSERT_EQ(streamed, decode_at_once(*tokenizer_, ids, drops_blank)) << "seed " << seed << " round " << round;
    ASSERT_EQ(streamed, tokenizer_->decode(ids));
  }
}

TEST_P(RealTokenizer, an_answer_and_its_prompt_decode_to_the_whole) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 500; ++round) {
    const std::vector<TokenId> prompt = encode(*tokenizer_, random_text(random, 10).append("x"), SpecialTokens::AsText);
    const std::vector<TokenId> answer = encode(*tokenizer_, random_text(random, 20), SpecialTokens::AsText);
    std::string text = tokenizer_->decode(prompt);
    Detokenizer detokenizer(*tokenizer_);
    for (const TokenId id : answer) text += detokenizer.push(id);
    text += detokenizer.finish();
    std::vector<TokenId> whole = prompt;
    whole.insert(whole.end(), answer.begin(), answer.end());
    ASSERT_EQ(text, tokenizer_->decode(whole)) << "round " << round;
  }
}

TEST_P(RealTokenizer, four_threads_encode_the_same_as_one) {
  std::mt19937_64 random(3);
  std::vector<std::string> texts;
  std::vector<std::vector<TokenId>> expected;
  for (int index = 0; index < 200; ++index) {
    texts.push_back(random_text(random, 200));
    expected.push_back(encode(*tokenizer_, texts.back()));
  }
  std::array<int, 4> wrong{};
  {
    std::vector<std::jthread> threads;
    for (std::size_t thread = 0; thread < wrong.size(); ++thread) {
      threads.emplace_back([&, thread] {
        for (std::size_t index = 0; index < texts.size(); ++index) {
          const Result<std::vector<TokenId>> ids = tokenizer_->encode(texts[index], SpecialTokens::Parse, BeginToken::None);
          if (!ids || *ids != expected[index] || tokenizer_->decode(*ids).size() > texts[index].size()) ++wrong[thread];
        }
      });
    }
  }
  EXPECT_EQ(wrong, (std::array<int, 4>{}));
}

TEST_P(RealTokenizer, a_long_text_without_blanks_is_no_trap) {
  // Quadratic work here would take an hour, so that a bound in seconds is no measurement of speed.
  const auto start = std::chrono::steady_clock::now();
  for (const std::string& unit : {std::string("a"), std::string("ab"), std::string(" "), std::string("\n "), std::string("é"),
                                  std::string("1!"), std::string("<|")}) {
    std::string text;
    while (text.size() < 300'000) text += unit;
    const std::vector<TokenId> ids = encode(*tokenizer_, text);
    EXPECT_EQ(tokenizer_->decode(ids), text);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

}  // namespace
}  // namespace rubato::text
