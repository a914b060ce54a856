// SPDX-License-Identifier: Apache-2.0
// The model, the added tokens and tokenizer_config.json; the stages round the model are pipeline_json.cpp's.
#include "engine/text/tokenizer_json.h"

#include <algorithm>
#include <array>

#include "engine/text/byte_alphabet.h"
#include "engine/text/json_field.h"
#include "engine/text/pipeline_json.h"
#include "engine/text/utf8.h"

namespace rubato::text {
namespace {

constexpr std::int64_t token_id_max = (1 << 24) - 1;
constexpr std::size_t merges_max = 1 << 22;
constexpr std::size_t added_tokens_max = 1 << 16;
constexpr std::size_t token_bytes_max = 4096;
constexpr std::size_t chat_template_bytes_max = 1 << 20;

// Some files flag these as ordinary words. A user's text must never become one, whatever the file says.
constexpr std::array<std::string_view, 18> turn_markers = {"<|im_start|>",
                                                           "<|im_end|>",
                                                           "<|start_header_id|>",
                                                           "<|end_header_id|>",
                                                           "<|eot_id|>",
                                                           "<|eom_id|>",
                                                           "<|begin_of_text|>",
                                                           "<|end_of_text|>",
                                                           "<|endoftext|>",
                                                           "[INST]",
                                                           "[/INST]",
                                                           "[SYSTEM_PROMPT]",
                                                           "[/SYSTEM_PROMPT]",
                                                           "<s>",
                                                           "</s>",
                                                           "<|system|>",
                                                           "<|user|>",
                                                           "<|assistant|>"};

/// `<0xNN>`, as SentencePiece writes byte pieces.
std::optional<std::uint8_t> byte_of_piece(std::string_view piece) {
  if (piece.size() != 6 || !piece.starts_with("<0x") || piece[5] != '>') return std::nullopt;
  unsigned value = 0;
  for (const char digit : piece.substr(3, 2)) {
    const bool decimal = digit >= '0' && digit <= '9';
    const bool hex = digit >= 'A' && digit <= 'F';
    if (!decimal && !hex) return std::nullopt;
    value = value * 16 + static_cast<unsigned>(decimal ? digit - '0' : digit - 'A' + 10);
  }
  return static_cast<std::uint8_t>(value);
}

class Loader {
 public:
  explicit Loader(const TokenizerFiles& files) : files_(files) {}

  TokenizerParts load() {
    const nlohmann::json document = JsonField::parse(files_.tokenizer, "tokenizer.json");
    const JsonField root(document, "tokenizer.json ");
    const JsonField model = root.at("model");
    check_model(model);
    const std::vector<AddedToken> added = read_added_tokens(root);
    read_vocabulary(model, added);

    parts_.normalizer = read_normalizer(root.find("normalizer"));
    PreTokenizerRules pre_tokenizer = read_pre_tokenizer(root.find("pre_tokenizer"));
    parts_.pre_tokenizer = std::move(pre_tokenizer.steps);
    parts_.bpe.alphabet = pre_tokenizer.alphabet;
    parts_.decoder = read_decoder(root.at("decoder"));
    const Surround surround = read_post_processor(root.find("post_processor"), parts_.vocabulary);
    parts_.prefix = surround.prefix;
    parts_.suffix = surround.suffix;
    if (surround.prefix.size() == 1) parts_.begin = surround.prefix.front();

    read_config();
    mark_special(added);
    decode_pieces();
    fill_model(model);
    fill_matchers(added);
    return std::move(parts_);
  }

 private:
  static void check_model(const JsonField& model) {
    if (const auto type = model.find("type"); type && type->string() != "BPE") {
      type->fail("`" + type->string() + "` is not supported; supported is BPE");
    }
    if (const auto dropout = model.find("dropout")) dropout->fail("merges dropped at random are for training");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (const auto affix = model.find(key); affix && !affix->string().empty()) affix->fail("not supported");
    }
  }

  static std::vector<AddedToken> read_added_tokens(const JsonField& root) {
    std::vector<AddedToken> tokens;
    const std::optional<JsonField> list = root.find("added_tokens");
    if (!list) return tokens;
    for (const JsonField& item : list->items(added_tokens_max)) {
      AddedToken token;
      token.id = static_cast<TokenId>(item.at("id").integer(0, token_id_max));
      token.content = item.at("content").string();
      if (token.content.empty() || token.content.size() > token_bytes_max)
        item.fail("content is empty or longer than 4096 bytes");
      token.single_word = item.boolean_or("single_word", false);
      token.lstrip = item.boolean_or("lstrip", false);
      token.rstrip = item.boolean_or("rstrip", false);
      token.special = item.boolean_or("special", false);
      token.normalized = item.boolean_or("normalized", !token.special);
      tokens.push_back(std::move(token));
    }
    return tokens;
  }

  void name_token(const JsonField& where, TokenId id, const std::string& content) {
    std::string& slot = parts_.contents[id];
    if (parts_.kinds[id] != TokenKind::Absent && slot != content) {
      where.fail("id " + std::to_string(id) + " is both `" + slot + "` and `" + content + "`");
    }
    slot = content;
    parts_.kinds[id] = TokenKind::Text;
    const auto [entry, inserted] = parts_.ids.emplace(content, id);
    if (!inserted && entry->second != id) {
      where.fail("`" + content + "` has two ids, " + std::to_string(entry->second) + " and " + std::to_string(id));
    }
  }

  void read_vocabulary(const JsonField& model, const std::vector<AddedToken>& added) {
    const JsonField vocabulary = model.at("vocab");
    std::int64_t id_max = -1;
    std::size_t count = added.size();
    for (const auto& [piece, id] : vocabulary.object().items()) {
      if (piece.size() > token_bytes_max) vocabulary.fail("a token is longer than 4096 bytes");
      id_max = std::max(id_max, JsonField(id, vocabulary.path()).integer(0, token_id_max));
      ++count;
    }
    for (const AddedToken& token : added) id_max = std::max<std::int64_t>(id_max, token.id);
    if (count == 0) vocabulary.fail("is empty");
    // Gaps happen (padding, reserved ids), but a table of the largest id's size must be worth its memory.
    if (id_max >= static_cast<std::int64_t>(2 * count + 65536)) {
      vocabulary.fail("id " + std::to_string(id_max) + " is far beyond the " + std::to_string(count) + " tokens there are");
    }
    parts_.vocabulary = static_cast<std::int32_t>(id_max + 1);
    parts_.contents.resize(parts_.vocabulary);
    parts_.kinds.assign(parts_.vocabulary, TokenKind::Absent);
    for (const auto& [piece, id] : vocabulary.object().items()) name_token(vocabulary, id.get<TokenId>(), piece);
    for (const AddedToken& token : added) name_token(vocabulary, token.id, token.content);
  }

  /// bos_token and eos_token are a string or an object with `content`.
  std::optional<TokenId> named_token(const JsonField& config, std::string_view key) const {
    const std::optional<JsonField> field = config.find(key);
    if (!field) return std::nullopt;
    const std::string& content = field->is_string() ? field->string() : field->at("content").string();
    const auto found = parts_.ids.find(content);
    if (found == parts_.ids.end()) field->fail("`" + content + "` is not in the vocabulary of tokenizer.json");
    return found->second;
  }

  void read_config() {
    if (files_.config) {
      const nlohmann::json document = JsonField::parse(*files_.config, "tokenizer_config.json");
      const JsonField config(document, "tokenizer_config.json ");
      if (const auto begin = named_token(config, "bos_token")) parts_.begin = begin;
      parts_.end = named_token(config, "eos_token");
      apply_flag(config, "add_bos_token", parts_.begin, parts_.prefix);
      apply_flag(config, "add_eos_token", parts_.end, parts_.suffix);
      read_chat_template(config);
    }
    if (files_.chat_template) parts_.chat_template = std::string(*files_.chat_template);
    if (parts_.chat_template && parts_.chat_template->size() > chat_template_bytes_max) {
      throw BadFile{"chat_template: longer than 1 MiB"};
    }
  }

  /// An explicit flag replaces what the post-processor says on that side.
  static void apply_flag(const JsonField& config, std::string_view key, std::optional<TokenId> token,
                         std::vector<TokenId>& side) {
    const std::optional<JsonField> flag = config.find(key);
    if (!flag) return;
    side.clear();
    if (!flag->boolean()) return;
    if (!token) flag->fail("is true, but the file names no such token");
    side.push_back(*token);
  }

  void read_chat_template(const JsonField& config) {
    const std::optional<JsonField> field = config.find("chat_template");
    if (!field) return;
    if (!field->is_array()) {
      parts_.chat_template = field->string();
      return;
    }
    for (const JsonField& item : field->items(64)) {
      if (item.at("name").string() == "default") parts_.chat_template = item.at("template").string();
    }
  }

  void mark_special(const std::vector<AddedToken>& added) {
    const auto mark = [&](TokenId id) { parts_.kinds[id] = TokenKind::Special; };
    for (const AddedToken& token : added) {
      if (token.special || std::ranges::find(turn_markers, token.content) != turn_markers.end()) mark(token.id);
    }
    if (parts_.begin) mark(*parts_.begin);
    if (parts_.end) mark(*parts_.end);
  }

  void decode_pieces() {
    parts_.bytes.resize(parts_.vocabulary);
    for (TokenId id = 0; id < parts_.vocabulary; ++id) {
      if (parts_.kinds[id] != TokenKind::Text) continue;
      std::string piece = parts_.contents[id];
      if (parts_.decoder.byte_level) {
        parts_.bytes[id] = bytes_of_piece(piece).value_or(piece);
        continue;
      }
      for (const auto& [pattern, content] : parts_.decoder.replacements) piece = replace_all(piece, pattern, content);
      const std::optional<std::uint8_t> byte = parts_.decoder.byte_fallback ? byte_of_piece(piece) : std::nullopt;
      parts_.bytes[id] = byte ? std::string(1, static_cast<char>(*byte)) : piece;
    }
  }

  void fill_model(const JsonField& model) {
    Bpe& bpe = parts_.bpe;
    bpe.byte_ids.fill(-1);
    bpe.fallback_ids.fill(-1);
    bpe.fuse_unknown = model.boolean_or("fuse_unk", false);
    bpe.byte_fallback = model.boolean_or("byte_fallback", false) && bpe.alphabet == Alphabet::Characters;
    bpe.ignore_merges = model.boolean_or("ignore_merges", false);
    if (const auto unknown = model.find("unk_token")) {
      const auto found = parts_.ids.find(unknown->string());
      if (found == parts_.ids.end()) unknown->fail("`" + unknown->string() + "` is not in the vocabulary");
      bpe.unknown = found->second;
    }
    fill_pieces(model.at("vocab").object());
    fill_merges(model.at("merges"));
  }

  /// Only the model's own vocabulary, and of that no control tokens: text must not turn into one.
  void fill_pieces(const nlohmann::json& vocabulary) {
    Bpe& bpe = parts_.bpe;
    bpe.pieces.resize(parts_.vocabulary);
    bpe.table.reserve(vocabulary.size());
    for (const auto& [content, number] : vocabulary.items()) {
      const auto id = number.get<TokenId>();
      if (parts_.kinds[id] == TokenKind::Special || content.empty()) continue;
      if (const auto byte = byte_of_piece(content)) bpe.fallback_ids[*byte] = id;
      if (bpe.alphabet == Alphabet::Bytes) {
        const std::optional<std::string> bytes = bytes_of_piece(content);
        if (!bytes) continue;
        bpe.pieces[id] = *bytes;
        if (bytes->size() == 1) bpe.byte_ids[static_cast<unsigned char>(bytes->front())] = id;
      } else {
        bpe.pieces[id] = content;
        const Character first = character_at(content, 0);
        if (first.size_bytes == content.size()) bpe.character_ids.emplace(first.code_point, id);
      }
      bpe.table.insert(bpe.pieces, id);
    }
  }

  void fill_merges(const JsonField& merges) {
    const std::vector<JsonField> items = merges.items(merges_max);
    parts_.bpe.merges.reserve(items.size());
    std::uint32_t rank = 0;
    for (const JsonField& item : items) {
      if (item.is_string() && item.string().starts_with("#version")) continue;
      const auto [left, right] = read_pair(item);
      const auto id_of = [&](const std::string& piece) {
        const auto found = parts_.ids.find(piece);
        if (found == parts_.ids.end()) item.fail("`" + piece + "` is not in the vocabulary");
        return found->second;
      };
      const TokenId result = id_of(left + right);
      if (parts_.kinds[result] != TokenKind::Special) parts_.bpe.merges.insert(id_of(left), id_of(right), {rank, result});
      ++rank;
    }
  }

  static std::pair<std::string, std::string> read_pair(const JsonField& item) {
    std::pair<std::string, std::string> pair;
    if (item.is_string()) {
      const std::string& text = item.string();
      const std::size_t blank = text.find(' ');
      if (blank == std::string::npos || text.find(' ', blank + 1) != std::string::npos)
        item.fail("expected two tokens with one blank between");
      pair = {text.substr(0, blank), text.substr(blank + 1)};
    } else {
      const std::vector<JsonField> sides = item.items(2);
      if (sides.size() != 2) item.fail("expected two tokens");
      pair = {sides[0].string(), sides[1].string()};
    }
    if (pair.first.empty() || pair.second.empty()) item.fail("one of the two tokens is empty");
    return pair;
  }

  void fill_matchers(const std::vector<AddedToken>& added) {
    for (const AddedToken& token : added) {
      const bool text = parts_.kinds[token.id] == TokenKind::Text;
      if (!token.normalized) {
        parts_.raw_all.insert(token, token.content);
        if (text) parts_.raw_text.insert(token, token.content);
        continue;
      }
      Result<std::string> content = parts_.normalizer.apply(token.content, token_bytes_max * 64);
      if (!content) throw BadFile{"tokenizer.json added_tokens: " + content.error().message};
      parts_.normalized_all.insert(token, *content);
      if (text) parts_.normalized_text.insert(token, *content);
    }
  }

  const TokenizerFiles& files_;
  TokenizerParts parts_;
};

}  // namespace

Result<TokenizerParts> parse_tokenizer(const TokenizerFiles& files) {
  try {
    return Loader(files).load();
  } catch (const BadFile& bad) {
    return unexpected(ErrorCode::InvalidArgument, bad.message);
  } catch (const std::bad_alloc&) {
    return unexpected(ErrorCode::InvalidArgument, "tokenizer.json: more than memory holds");
  } catch (const std::exception& error) {  // nlohmann: what the checks above should have caught
    return unexpected(ErrorCode::InvalidArgument, std::string("tokenizer.json: ") + error.what());
  }
}

}  // namespace rubato::text
