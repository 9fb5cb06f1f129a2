// Sizes stable-diffusion.cpp's graphs without weights: its own code builds them, its own allocator says how large a
// buffer each needs. See resize.py beside this file for how it is built and called.
//
//     size_graphs ARCHITECTURE TENSORS < requests > answers
//
// TENSORS has a line per tensor: name, type, number of dimensions, sizes (fastest first). Each request is a line, each
// answer the bytes of its buffer:
//
//     diffusion WIDTH HEIGHT FRAMES TEXT_TOKENS FLASH [REFERENCE_WIDTH REFERENCE_HEIGHT]...
//     decode|encode|tiny_decode|tiny_encode WIDTH HEIGHT FRAMES DIRECT_CONVOLUTIONS FLASH
//     language_model TOKENS
//     vision WIDTH HEIGHT

#include <any>
#include <array>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <unordered_set>

// The engine keeps its graph builders and its contexts to itself.
#define protected public
#define private public
#include "ggml-alloc.h"
#include "ggml_extend.hpp"
#include "model.h"

#include "common_dit.hpp"

#include "auto_encoder_kl.hpp"
#include "flux.hpp"
#include "llm.hpp"
#include "mmdit.hpp"
#include "qwen_image.hpp"
#include "tae.hpp"
#include "unet.hpp"
#include "wan.hpp"
#include "z_image.hpp"

using Tensor = sd::Tensor<float>;
using Build  = std::function<ggml_cgraph*()>;

namespace {

struct Architecture {
    SDVersion version;
    int cell_px;       // pixels along the side of a latent cell
    int channels;      // of the latent
    int context;       // width of the text that the diffusion model attends to
    bool wan_vae;
    float conv_scale;  // of the autoencoder's kernels
};

const std::map<std::string, Architecture> architectures = {
    {"sd15", {VERSION_SD1, 8, 4, 768, false, 1.f}},
    {"sd21", {VERSION_SD2, 8, 4, 1024, false, 1.f}},
    {"sd1_tiny", {VERSION_SD1_TINY_UNET, 8, 4, 768, false, 1.f}},
    {"sdxs512", {VERSION_SDXS_512_DS, 8, 4, 768, false, 1.f}},
    {"sdxl", {VERSION_SDXL, 8, 4, 2048, false, 1.f / 32.f}},
    {"sd3m", {VERSION_SD3, 8, 16, 4096, false, 1.f}},
    {"sd35m", {VERSION_SD3, 8, 16, 4096, false, 1.f}},
    {"sd35l", {VERSION_SD3, 8, 16, 4096, false, 1.f}},
    {"flux1dev", {VERSION_FLUX, 8, 16, 4096, false, 1.f}},
    {"flux2dev", {VERSION_FLUX2, 16, 128, 15360, false, 1.f}},
    {"klein4b", {VERSION_FLUX2_KLEIN, 16, 128, 7680, false, 1.f}},
    {"klein9b", {VERSION_FLUX2_KLEIN, 16, 128, 12288, false, 1.f}},
    {"zimage", {VERSION_Z_IMAGE, 8, 16, 2560, false, 1.f}},
    {"qwenedit", {VERSION_QWEN_IMAGE, 8, 16, 3584, true, 1.f}},
    {"wan21_1.3b", {VERSION_WAN2, 8, 16, 4096, true, 1.f}},
    {"wan21_14b", {VERSION_WAN2, 8, 16, 4096, true, 1.f}},
    {"wan22_5b", {VERSION_WAN2_2_TI2V, 16, 48, 4096, true, 1.f}},
};

String2TensorStorage read_tensors(const char* path) {
    std::map<std::string, ggml_type> types;
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        if (ggml_type_name(static_cast<ggml_type>(i)) != nullptr) {
            types[ggml_type_name(static_cast<ggml_type>(i))] = static_cast<ggml_type>(i);
        }
    }
    String2TensorStorage tensors;
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
        std::istringstream words(line);
        std::string name, type;
        int dimensions;
        int64_t sizes[SD_MAX_DIMS] = {1, 1, 1, 1, 1};
        words >> name >> type >> dimensions;
        for (int i = 0; i < dimensions; i++) {
            words >> sizes[i];
        }
        tensors[name] = TensorStorage(name, types.at(type), sizes, dimensions, 0);
    }
    return tensors;
}

size_t buffer_of(GGMLRunner& runner, const Build& build) {
    // Weights are memory of their own: an address, never read, tells the allocator so.
    for (auto* tensor = ggml_get_first_tensor(runner.params_ctx); tensor != nullptr;
         tensor = ggml_get_next_tensor(runner.params_ctx, tensor)) {
        tensor->data = reinterpret_cast<void*>(0x1000);
    }
    runner.reset_compute_ctx();
    ggml_cgraph* graph = runner.get_compute_graph(build);
    auto* allocator    = ggml_gallocr_new(ggml_backend_get_default_buffer_type(runner.runtime_backend));
    size_t size        = 0;
    ggml_gallocr_reserve_n_size(allocator, graph, nullptr, nullptr, &size);
    ggml_gallocr_free(allocator);
    runner.free_compute_ctx();
    return size;
}

class Sizer {
public:
    Sizer(const std::string& name, const char* tensors)
        : name(name), model(architectures.at(name)), tensors(read_tensors(tensors)), backend(ggml_backend_cpu_init()) {}

    size_t answer(const std::string& graph, std::istringstream& words) {
        if (graph == "diffusion") {
            return diffusion(words);
        }
        if (graph == "language_model" || graph == "vision") {
            return encoder(graph, words);
        }
        return autoencoder(graph, words);
    }

private:
    std::string name;
    Architecture model;
    String2TensorStorage tensors;
    ggml_backend_t backend;
    const std::string prefix = "model.diffusion_model";
    std::shared_ptr<UNetModelRunner> unet;
    std::shared_ptr<MMDiTRunner> mmdit;
    std::shared_ptr<Flux::FluxRunner> flux;
    std::shared_ptr<WAN::WanRunner> wan;
    std::shared_ptr<Qwen::QwenImageRunner> qwen;
    std::shared_ptr<ZImage::ZImageRunner> zimage;
    std::shared_ptr<LLM::LLMRunner> llm;
    std::map<bool, std::shared_ptr<VAE>> vaes;

    template <typename Runner, typename... Arguments>
    static Runner& once(std::shared_ptr<Runner>& kept, Arguments&&... arguments) {
        if (kept == nullptr) {
            kept = std::make_shared<Runner>(std::forward<Arguments>(arguments)...);
        }
        return *kept;
    }

    size_t diffusion(std::istringstream& words) {
        int width, height, frames, text, flash, wide, high;
        words >> width >> height >> frames >> text >> flash;
        std::vector<Tensor> references;
        while (words >> wide >> high) {
            references.push_back(Tensor({wide / model.cell_px, high / model.cell_px, model.channels, 1}));
        }
        const int w = width / model.cell_px, h = height / model.cell_px, t = (frames - 1) / 4 + 1;
        const Tensor x({w, h, model.channels, 1}), context({model.context, text, 1}), one({1});
        if (model.version <= VERSION_SDXL) {
            auto& runner              = once(unet, backend, false, tensors, prefix, model.version);
            runner.flash_attn_enabled = flash;
            const Tensor y            = model.version == VERSION_SDXL ? Tensor({2816, 1}) : Tensor();
            return buffer_of(runner, [&] { return runner.build_graph(x, one, context, {}, y); });
        }
        if (model.version == VERSION_SD3) {
            auto& runner              = once(mmdit, backend, false, tensors, prefix);
            runner.flash_attn_enabled = flash;
            const Tensor y({2048, 1});
            return buffer_of(runner, [&] { return runner.build_graph(x, one, context, y); });
        }
        if (model.version == VERSION_QWEN_IMAGE) {
            auto& runner              = once(qwen, backend, false, tensors, prefix, model.version);
            runner.flash_attn_enabled = flash;
            return buffer_of(runner, [&] { return runner.build_graph(x, one, context, references, true); });
        }
        if (model.version == VERSION_Z_IMAGE) {
            auto& runner              = once(zimage, backend, false, tensors, prefix, model.version);
            runner.flash_attn_enabled = flash;
            return buffer_of(runner, [&] { return runner.build_graph(x, one, context); });
        }
        if (model.wan_vae) {
            auto& runner              = once(wan, backend, false, tensors, prefix, model.version);
            runner.flash_attn_enabled = flash;
            // Wan 2.2 5B has a time step for each frame of the latent.
            const Tensor clip({w, h, t, model.channels}), steps({model.version == VERSION_WAN2_2_TI2V ? t : 1});
            return buffer_of(runner, [&] { return runner.build_graph(clip, steps, context); });
        }
        auto& runner              = once(flux, backend, false, tensors, prefix, model.version);
        runner.flash_attn_enabled = flash;
        const Tensor y            = model.version == VERSION_FLUX ? Tensor({768, 1}) : Tensor();
        return buffer_of(runner, [&] { return runner.build_graph(x, one, context, {}, y, one, references); });
    }

    VAE& vae(bool tiny) {
        auto& kept = vaes[tiny];
        if (kept != nullptr) {
            return *kept;
        }
        if (tiny && model.wan_vae) {
            kept = std::make_shared<TinyVideoAutoEncoder>(backend, false, String2TensorStorage(), "tae", false, model.version);
        } else if (tiny) {
            kept = std::make_shared<TinyImageAutoEncoder>(backend, false, String2TensorStorage(), "tae", false, model.version);
        } else if (model.wan_vae) {
            kept = std::make_shared<WAN::WanVAERunner>(backend, false, tensors, "first_stage_model", false, model.version);
        } else {
            kept = std::make_shared<AutoEncoderKL>(backend, false, tensors, "first_stage_model", false, false, model.version);
        }
        if (model.conv_scale != 1.f) {
            kept->set_conv2d_scale(model.conv_scale);
        }
        return *kept;
    }

    size_t autoencoder(const std::string& graph, std::istringstream& words) {
        int width, height, frames, direct, flash;
        words >> width >> height >> frames >> direct >> flash;
        const bool tiny = graph.rfind("tiny_", 0) == 0, decode = graph.find("decode") != std::string::npos;
        const int t = (frames - 1) / 4 + 1;
        Tensor z({width, height, 3, 1});
        if (decode) {
            const int w = width / model.cell_px, h = height / model.cell_px;
            z = model.wan_vae ? Tensor({w, h, t, model.channels}) : Tensor({w, h, model.channels, 1});
        } else if (model.wan_vae) {
            z = Tensor({width, height, frames, 3});
        }
        auto& runner                 = vae(tiny);
        runner.conv2d_direct_enabled = direct;
        runner.flash_attn_enabled    = flash;
        return buffer_of(runner, [&]() -> ggml_cgraph* {
            if (auto* kl = dynamic_cast<AutoEncoderKL*>(&runner)) {
                return kl->build_graph(z, decode);
            }
            if (auto* clip = dynamic_cast<WAN::WanVAERunner*>(&runner)) {
                return clip->build_graph(z, decode);
            }
            if (auto* image = dynamic_cast<TinyImageAutoEncoder*>(&runner)) {
                return image->build_graph(z, decode);
            }
            return dynamic_cast<TinyVideoAutoEncoder&>(runner).build_graph(z, decode);
        });
    }

    size_t encoder(const std::string& graph, std::istringstream& words) {
        const auto arch = model.version == VERSION_QWEN_IMAGE ? LLM::LLMArch::QWEN2_5_VL
                          : model.version == VERSION_FLUX2    ? LLM::LLMArch::MISTRAL_SMALL_3_2
                                                              : LLM::LLMArch::QWEN3;
        auto& runner = once(llm, arch, backend, false, tensors, "text_encoders.llm", model.version == VERSION_QWEN_IMAGE);
        if (graph == "vision") {
            int width, height;
            words >> width >> height;
            const Tensor image({width, height, 3, 1});
            return buffer_of(runner, [&] { return runner.build_encode_image_graph(image); });
        }
        int tokens;
        words >> tokens;
        // Which layers' states are kept, and whether padding is masked: as the engine's conditioner asks.
        const bool klein     = model.version == VERSION_FLUX2_KLEIN;
        std::set<int> layers = klein                             ? std::set<int>{9, 18, 27}
                               : model.version == VERSION_FLUX2   ? std::set<int>{10, 20, 30}
                               : model.version == VERSION_Z_IMAGE ? std::set<int>{35}
                                                                  : std::set<int>{};
        const Tensor mask = klein ? Tensor({tokens, tokens}) : Tensor();
        const sd::Tensor<int32_t> ids({tokens});
        return buffer_of(runner, [&] { return runner.build_graph(ids, mask, {}, layers); });
    }
};

}  // namespace

int main(int count, char** arguments) {
    if (count != 3 || architectures.count(arguments[1]) == 0) {
        std::cerr << "usage: size_graphs ARCHITECTURE TENSORS < requests > answers\n";
        return 2;
    }
    Sizer sizer(arguments[1], arguments[2]);
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        std::string graph;
        words >> graph;
        std::cout << "= " << sizer.answer(graph, words) << std::endl;
    }
    return 0;
}
