#!/usr/bin/env bash
# The images and the manifests in a real Kubernetes: a cluster of kind that is deleted at the end.
# A pod is deleted while the example trains; its Job must complete. Build arguments of the trainer's image: "$@".
set -euo pipefail
cd "$(dirname "$0")/../.."

missing=()
for tool in docker kind kubectl openssl; do
  command -v "$tool" > /dev/null || missing+=("$tool")
done
if ((${#missing[@]})); then
  echo "test-kind needs ${missing[*]}: install what is missing, and run it again" >&2
  exit 1
fi

name=dalsegno-test-$$
directory=$(mktemp -d)
export KUBECONFIG=$directory/kubeconfig
finish() {
  code=$?
  if ((code)); then
    kubectl get pods,jobs --output=wide || true
    kubectl logs --selector=app.kubernetes.io/instance=ddp --prefix --tail=30 || true
  fi
  kind delete cluster --name "$name" || true
  rm -rf "$directory"
}
trap finish EXIT

docker build --file=deploy/docker/master.Dockerfile --tag=dalsegno-master:kind .
docker build --file=deploy/docker/trainer.Dockerfile --tag=dalsegno-trainer:kind "$@" .
kind create cluster --name "$name" --wait=180s
kind load docker-image --name "$name" dalsegno-master:kind dalsegno-trainer:kind
# A hostPath keeps its owner: pods are no root.
docker exec "$name-control-plane" mkdir --mode=1777 /checkpoints

openssl rand -hex 32 > "$directory/token"
kubectl create secret generic ddp-token --from-file=token="$directory/token"
kubectl kustomize deploy/kind | kubectl apply --filename=-
kubectl rollout status statefulset/ddp-master --timeout=180s

nodes=app.kubernetes.io/component=trainer
for _ in {1..90}; do # kubectl wait fails where there is no pod yet
  said=$(kubectl logs --selector="$nodes" --tail=-1 2> /dev/null || true)
  [[ $said == *"step 50:"* ]] && break
  sleep 2
done
[[ $said == *"step 50:"* ]] || { echo "no training after three minutes" >&2; exit 1; }
kubectl delete "$(kubectl get pods --selector="$nodes" --output=name | head -n 1)" --wait=false
kubectl wait job/ddp --for=condition=complete --timeout=900s
echo "the Job is complete, and it has lost a pod meanwhile"
