#!/usr/bin/env bash
# The CIFAR-10 tables of the README: hours on two cores, one thread a run, two runs at a time.
#     bash results/cifar10.sh [DATA_DIR]
# Skips what runs/cifar10 has finished; a run that was cut short goes on. Keeps results.json of each run as results/cifar10/NAME.json;
# `python results/report.py results/cifar10` makes the tables and the curve of them.
cd "$(dirname "$0")/.." || exit
export OMP_NUM_THREADS=1 DATA=${1:-data}

one() {     # NAME flags...
    local out=runs/cifar10/$1 setting="--dataset cifar10 --data-dir $DATA --width 16 --image-size 16 --batch-size 64 --lr 0.04 --epochs-first 20 --epochs 5"
    [ -e "$out/results.json" ] && return
    [[ $* = *--init* ]] && setting="--data-dir $DATA --epochs 5"    # the rest is the other run's
    if [ -e "$out/config.json" ]; then python train.py --resume --out "$out"; else python train.py --out "$out" $setting "${@:2}"; fi > "$out.log" &&
        python eval.py "$out" >> "$out.log" && cp "$out/results.json" "results/cifar10/$1.json" && echo "$1 $(grep -m 1 AA "$out.log")"
}
export -f one
each() { xargs -P 2 -L 1 bash -c 'one "$@"' one; }
mkdir -p runs/cifar10 results/cifar10

# Task 1 depends on the plasticity loss and the seed alone: these runs train it, all others start from them.
for s in 0 1 2; do
    echo "hsd-$s --seed $s"
    echo "co2l-$s --seed $s --plasticity supcon --stability ird"
done | each

fnc2=runs/cifar10/hsd supcon=runs/cifar10/co2l
for s in 0 1 2; do echo "none-$s --init $fnc2-$s --stability none"; done | each
for s in 0 1 2; do
    echo "ird-$s --init $fnc2-$s --stability ird"
    echo "sprd-$s --init $fnc2-$s --stability sprd"
    echo "noreplay-$s --init $fnc2-$s --no-pseudo-replay"
    echo "supcon-$s --init $supcon-$s --stability none"
done | each
for s in 0 1 2; do echo "joint-$s --seed $s --tasks 1 --epochs-first 8"; done | each
for s in 0 1 2; do for b in 200 500; do
    echo "hsd-buffer$b-$s --init $fnc2-$s --buffer $b"
    echo "co2l-buffer$b-$s --init $supcon-$s --stability ird --buffer $b"
done; done | each
