#!/usr/bin/env bash
# The CIFAR-10 tables with 50 later epochs, most important first, two at a time with one thread each.
#     bash results/cifar.sh [CIFAR10_DIR]                   # from the project's root
# Can be stopped and started again: results that are kept in results/cifar10-50 are skipped, and runs of train.py continue.
# Rows with --init start from task1.pt of another run, if it is in runs/cifar10: task 1 depends on plasticity loss and seed alone.
cd "$(dirname "$0")/.." || exit
export OMP_NUM_THREADS=1 DATA=${1:-data} KEEP=results/cifar10-50
export COMMON="--dataset cifar10 --data-dir $DATA --width 16 --image-size 16"
grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo && COMMON+=" --amp"       # without these bfloat16 is emulated, 8 times slower than float32
export SETTING="$COMMON --batch-size 128 --lr 0.125 --epochs-first 25 --epochs 50"
mkdir -p runs/cifar10 $KEEP

one() {     # NAME flags...: a run of train.py; NAME --method ...: of results/baselines.py
    local name=$1 out=runs/cifar10/$1; shift
    local flags="$*" init=$(sed -n 's/.*\(--init [^ ]*\).*/\1/p' <<< "$*")
    [ -e "${init#--init }" ] || set -- ${flags/$init/}      # no such file on this machine: task 1 is trained again
    [ -e "$KEEP/$name.json" ] && return
    case "$*" in
        "--method cila"*) rm -rf "$out"; python results/baselines.py $SETTING "$@" --out "$out" ;;
        --method*) rm -rf "$out"; python results/baselines.py $COMMON "$@" --out "$out" ;;
        *) if [ -e "$out/config.json" ]; then python train.py --resume --out "$out"; else python train.py $SETTING "$@" --out "$out"; fi &&
               python eval.py "$out" ;;
    esac > "$out.log" && cp "$out/results.json" "$KEEP/$name.json" && cp "$out/log.jsonl" "$KEEP/$name.jsonl" && echo "$name: done"
}
export -f one
each() { xargs -P 2 -L 1 bash -c 'one "$@"' one; }
fnc2=runs/cifar10/hsd supcon=runs/cifar10/co2l

for s in 0 1 2; do                      # 1
    echo "hsd-$s --seed $s"
    echo "co2l-$s --seed $s --plasticity supcon --stability ird"
done | each
{
    for s in 0 1 2; do echo "none-$s --seed $s --init $fnc2-$s/task1.pt --stability none"; done
    for s in 0 1 2; do echo "ird-$s --seed $s --init $fnc2-$s/task1.pt --stability ird"; done
    for s in 0 1 2; do                  # 2: as many passes of the network, 4.5 million; rates: the better of two on validation images
        echo "er-buffer200-$s --method er --buffer 200 --seed $s --epochs 45"
        echo "derpp-buffer200-$s --method derpp --lr 0.1 --buffer 200 --seed $s --epochs 30"
        echo "joint-$s --seed $s --tasks 1 --epochs-first 45"
    done
    for s in 0 1 2; do                  # 3
        echo "sprd-$s --seed $s --init $fnc2-$s/task1.pt --stability sprd"
        echo "noreplay-$s --seed $s --init $fnc2-$s/task1.pt --no-pseudo-replay"
        echo "supcon-$s --seed $s --init $supcon-$s/task1.pt --plasticity supcon --stability none"
        echo "hsd-buffer200-$s --seed $s --init $fnc2-$s/task1.pt --buffer 200"
        echo "co2l-buffer200-$s --seed $s --init $supcon-$s/task1.pt --buffer 200 --plasticity supcon --stability ird"
    done
    echo "der-buffer200-0 --method der --buffer 200 --epochs 45"        # 4: one seed, equal passes; published rates, not tuned
    echo "icarl-buffer200-0 --method icarl --buffer 200 --epochs 90"
    echo "gem-buffer200-0 --method gem --buffer 200 --epochs 26"
    echo "gss-buffer200-0 --method gss --buffer 200 --epochs 22"
    echo "gcr-buffer200-0 --method gcr --buffer 200 --epochs 30"
    echo "cila-buffer200-0 --method cila --buffer 200 --init $supcon-0/task1.pt"    # no kappa was published; not tuned
    for g in 0 4; do for s in 0 1 2; do echo "hsd-gamma$g-$s --seed $s --gamma $g"; done; done   # 5
} | each
