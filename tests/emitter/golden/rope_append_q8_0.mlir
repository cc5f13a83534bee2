// castiron emit --kernel rope_append --shape 4x2x16 --context 64 --tokens 8 --kv-cache-type q8_0 --isa avx2 --threads 2
// 165 lines, sha256 661b401077e5f4845ca60a012c317dde9eb938743fe1d99927bb55ddd9a776ef
            scf.for %82 = %c0 to %c3 step %c3 {
              %84 = arith.muli %82, %c4 : index
              %85 = arith.addi %81, %84 : index
              %86 = vector.load %m0[%10, %85] : memref<8x128xf32>, vector<8xf32>
              %87 = arith.addi %84, %c2 : index
              %88 = arith.addi %81, %87 : index
              %89 = vector.load %m0[%10, %88] : memref<8x128xf32>, vector<8xf32>
              %90 = math.absf %86 : vector<8xf32>
              %91 = math.absf %89 : vector<8xf32>
              %92 = arith.cmpf ogt, %90, %91 : vector<8xf32>
              %93 = arith.select %92, %90, %91 : vector<8xi1>, vector<8xf32>
              %94 = vector.shuffle %93, %93 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
              %95 = vector.shuffle %93, %93 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
              %96 = arith.cmpf ogt, %94, %95 : vector<4xf32>
              %97 = arith.select %96, %94, %95 : vector<4xi1>, vector<4xf32>
              %98 = vector.shuffle %97, %97 [0, 1] : vector<4xf32>, vector<4xf32>
              %99 = vector.shuffle %97, %97 [2, 3] : vector<4xf32>, vector<4xf32>
              %100 = arith.cmpf ogt, %98, %99 : vector<2xf32>
              %101 = arith.select %100, %98, %99 : vector<2xi1>, vector<2xf32>
              %102 = vector.shuffle %101, %101 [0] : vector<2xf32>, vector<2xf32>
              %103 = vector.shuffle %101, %101 [1] : vector<2xf32>, vector<2xf32>
              %104 = arith.cmpf ogt, %102, %103 : vector<1xf32>
              %105 = arith.select %104, %102, %103 : vector<1xi1>, vector<1xf32>
              %106 = vector.extract %105[0] : f32 from vector<1xf32>
              %107 = arith.cmpf olt, %106, %c8 : f32
              %108 = arith.divf %c7, %106 : f32
              %109 = arith.select %107, %c9, %108 : f32
              %110 = vector.broadcast %109 : f32 to vector<8xf32>
              %111 = math.fma %86, %110, %c10 : vector<8xf32>
              %112 = math.fma %89, %110, %c10 : vector<8xf32>
              %113 = arith.divf %106, %c7 : f32
              %114 = vector.broadcast %113 : f32 to vector<1xf32>
              %115 = vector.bitcast %114 : vector<1xf32> to vector<4xi8>
              vector.store %115, %m6[%i0, %12, %29, %82, %c0] : memref<1x64x2x1x20xi8>, vector<4xi8>
              %116 = vector.broadcast %113 : f32 to vector<8xf32>
              %117 = vector.bitcast %111 : vector<8xf32> to vector<8xi32>
              %118 = arith.trunci %117 : vector<8xi32> to vector<8xi8>
              vector.store %118, %m6[%i0, %12, %29, %82, %c1] : memref<1x64x2x1x20xi8>, vector<8xi8>
              %119 = vector.bitcast %112 : vector<8xf32> to vector<8xi32>
              %120 = arith.trunci %119 : vector<8xi32> to vector<8xi8>
              vector.store %120, %m6[%i0, %12, %29, %82, %c11] : memref<1x64x2x1x20xi8>, vector<8xi8>
            }
