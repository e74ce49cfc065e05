MODEL_ARGS=(
   --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --vocab-size 151936
   --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
   --position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000
   --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-router-dtype fp32
)
