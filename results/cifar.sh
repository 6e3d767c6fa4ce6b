#!/usr/bin/env bash
# The CIFAR tables of the README: about seven hours on two cores, one thread a run, two runs at a time.
#     bash results/cifar.sh [CIFAR10_DIR [CIFAR100_FOLDER]]             # seen from the project's root
# Skips what runs/ has finished; a run that was cut short goes on. Keeps results.json of each run as results/NAME.json;
# `python results/report.py results/cifar10` makes the tables of them.
cd "$(dirname "$0")/.." || exit
export OMP_NUM_THREADS=1 DATA=${1:-data}

one() {     # NAME flags...
    local out=runs/$1 setting="--dataset cifar10 --data-dir $DATA --width 16 --image-size 16 --batch-size 64 --lr 0.04 --epochs-first 20 --epochs 5"
    [ -e "$out/results.json" ] && return
    [[ $* = *--init* ]] && setting="--data-dir $DATA --epochs 5"    # the rest is the other run's
    if [ -e "$out/config.json" ]; then python train.py --resume --out "$out"; else python train.py --out "$out" $setting "${@:2}"; fi > "$out.log" &&
        python eval.py "$out" >> "$out.log" && cp "$out/results.json" "results/$1.json" && echo "$1 $(grep -m 1 AA "$out.log")"
}
export -f one
each() { sed "s|^|$1/|" | xargs -P 2 -L 1 bash -c 'one "$@"' one; }
mkdir -p {runs,results}/{cifar10,cifar100}

# Task 1 depends on the plasticity loss and the seed alone: these runs train it, the others start from them.
for s in 0 1 2; do
    echo "hsd-$s --seed $s"
    echo "co2l-$s --seed $s --plasticity supcon --stability ird"
done | each cifar10

fnc2=runs/cifar10/hsd supcon=runs/cifar10/co2l
{   # the ablation of the losses
    for s in 0 1 2; do
        echo "none-$s --init $fnc2-$s --stability none"
        echo "ird-$s --init $fnc2-$s --stability ird"
        echo "sprd-$s --init $fnc2-$s --stability sprd"
        echo "noreplay-$s --init $fnc2-$s --no-pseudo-replay"
        echo "supcon-$s --init $supcon-$s --stability none"
        echo "joint-$s --seed $s --tasks 1 --epochs-first 8"      # as many views as the five tasks
    done
    # buffers
    for b in 200 500; do for s in 0 1 2; do
        echo "hsd-buffer$b-$s --init $fnc2-$s --buffer $b"
        echo "co2l-buffer$b-$s --init $supcon-$s --stability ird --buffer $b"
    done; done
    # images a class
    for n in 500 1000 2500; do
        echo "hsd-limit$n-0 --limit-per-class $n"
        echo "co2l-limit$n-0 --limit-per-class $n --plasticity supcon --stability ird"
    done
    # sensitivity; hsd-limit2500-batchstats-0 was `--init runs/cifar10/hsd-limit2500-0` with .train() for .eval() in model.frozen_copy
    for g in 0 2 4; do echo "hsd-limit2500-gamma$g-0 --limit-per-class 2500 --gamma $g"; done
    echo "hsd-limit2500-weight1-0 --limit-per-class 2500 --plasticity-weight 1"
} | each cifar10

# how much of a buffer's gain is the classifier's: 500 old images for it alone
for m in hsd co2l; do for s in 0 1 2; do
    out=cifar10/$m-probe500-$s
    [ -e results/$out.json ] || { cp -r runs/cifar10/$m-$s runs/$out && python eval.py runs/$out --probe-samples 500 > runs/$out.log && cp runs/$out/results.json results/$out.json; }
done; done

[ $# = 2 ] || exit 0
for s in 0 1; do
    echo "hsd-$s --seed $s"
    echo "co2l-$s --seed $s --plasticity supcon --stability ird"
done | sed "s|$| --dataset folder --data-dir $2 --tasks 5 --epochs-first 60 --epochs 15|" | each cifar100
