#!/usr/bin/env bash
# The CIFAR-10 runs of results/README.md, decisive ones first, two at a time with one thread each, 16 minutes a run, 9 from a shared first task.
#     bash results/cifar.sh [CIFAR10_DIR]                  # seen from the project's root
# Survives being stopped: skips what is kept in results/cifar10, and a run that was cut short goes on. Rows that start from the first
# task of another run need it in runs/: in a fresh clone remove hsd-*.json and co2l-*.json from results/cifar10 first.
cd "$(dirname "$0")/.." || exit
export OMP_NUM_THREADS=1 DATA=${1:-data} KEEP=results/cifar10
export SETTING="--dataset cifar10 --data-dir $DATA --width 16 --image-size 16 --batch-size 128 --lr 0.125 --epochs-first 25 --epochs 12 --amp"
mkdir -p runs/cifar10 $KEEP

keep() { cp "$1/results.json" "$KEEP/$2.json" && { [[ $2 = *probe0* ]] || cp "$1/log.jsonl" "$KEEP/$2.jsonl"; } && echo "$2 $(grep -m 1 ' AA ' "$1.log")"; }
one() {     # NAME flags...: a run of train.py; --method ...: of results/baselines.py; --again RUN: that run's linear readout without old images
    local out=runs/cifar10/$1 name=$1; shift
    [ -e "$KEEP/$name.json" ] && return
    if [ "$1" = --method ]; then
        rm -rf "$out"
        python results/baselines.py "$@" --dataset cifar10 --data-dir "$DATA" --width 16 --image-size 16 --amp --out "$out" > "$out.log" && keep "$out" "$name"
        return
    fi
    if [ "$1" = --again ]; then
        rm -rf "$out" && cp -r "$2" "$out" && python eval.py --probe-samples 0 "$out" > "$out.log" && keep "$out" "$name"
        return
    fi
    if [ -e "$out/config.json" ]; then python train.py --resume --out "$out"
    elif [[ $* = *--init* ]]; then python train.py --out "$out" "$@"            # the rest is the other run's
    else python train.py --out "$out" $SETTING "$@"; fi > "$out.log" && python eval.py "$out" >> "$out.log" && keep "$out" "$name"
}
export -f one keep
each() { xargs -P 2 -L 1 bash -c 'one "$@"' one; }

# Task 1 depends on the plasticity loss and the seed alone: these runs train it, the others start from them.
for s in 0 1 2; do
    echo "hsd-$s --seed $s"
    echo "co2l-$s --seed $s --plasticity supcon --stability ird"
done | each
[ -e $KEEP/alone.json ] || { python results/alone.py $SETTING > runs/cifar10/alone.log && cp runs/alone/cifar10.json $KEEP/alone.json; }
fnc2=runs/cifar10/hsd supcon=runs/cifar10/co2l
{
    for s in 0 1 2; do echo "ird-$s --init $fnc2-$s --stability ird"; done
    for s in 0 1 2; do echo "none-$s --init $fnc2-$s --stability none"; done
    for s in 0 1 2; do echo "joint-$s --seed $s --tasks 1 --epochs-first 15"; done      # as many views as the five tasks
    for s in 0 1 2; do                  # rates of two tried on validation images; epochs: as many passes of the network as above
        echo "er-buffer200-$s --method er --buffer 200 --seed $s --epochs 15"
        echo "derpp-buffer200-$s --method derpp --lr 0.1 --buffer 200 --seed $s --epochs 10"
    done
    for n in hsd ird none co2l; do for s in 0 1 2; do echo "$n-probe0-$s --again runs/cifar10/$n-$s"; done; done
    for s in 0 1 2; do for n in hsd co2l ird; do echo "$n-epochs24-$s --init runs/cifar10/$n-$s --epochs 24"; done; done     # later tasks twice as long
    for s in 0 1 2; do
        echo "supcon-$s --init $supcon-$s --stability none"
        echo "sprd-$s --init $fnc2-$s --stability sprd"
        echo "noreplay-$s --init $fnc2-$s --no-pseudo-replay"
        echo "predictor-$s --init $fnc2-$s --predictor"
        echo "authors-$s --init $fnc2-$s --predictor --alpha-max 0.5 --zeta-past 0.1"
    done
    for b in 200 500; do for s in 0 1 2; do
        echo "hsd-buffer$b-$s --init $fnc2-$s --buffer $b"
        echo "co2l-buffer$b-$s --init $supcon-$s --buffer $b"
    done; done
    for s in 0 1 2; do                  # equal passes again; rates: the published ones, not tried
        echo "der-buffer200-$s --method der --buffer 200 --seed $s --epochs 15"
        echo "icarl-buffer200-$s --method icarl --buffer 200 --seed $s --epochs 29"
        echo "gem-buffer200-$s --method gem --buffer 200 --seed $s --epochs 8"
        echo "gss-buffer200-$s --method gss --buffer 200 --seed $s --epochs 7"
    done
    for m in er derpp; do echo "$m-buffer200-epochs50-0 --method $m --lr 0.1 --buffer 200 --seed 0 --epochs 50"; done
    for g in 0 4; do for s in 0 1 2; do echo "hsd-gamma$g-$s --seed $s --gamma $g"; done; done
} | each
