// castiron emit --kernel gemm --shape 16x64 --codec bf16 --tokens 9 --isa avx2 --threads 2
// 634 lines, sha256 7e4bb822291b6f3efee21cdf0d860222a295136a8203bbfc69b6536a24e16c0c
                %90:10 = scf.for %79 = %c0 to %c8 step %c7 iter_args(%80 = %69, %81 = %70, %82 = %71, %83 = %72, %84 = %73, %85 = %74, %86 = %75, %87 = %76, %88 = %77, %89 = %78) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %91 = vector.load %1[%79, %54] : memref<64x16xf32>, vector<8xf32>
                  %92 = arith.addi %54, %c7 : index
                  %93 = vector.load %1[%79, %92] : memref<64x16xf32>, vector<8xf32>
                  %94 = arith.addi %17, %79 : index
                  %95 = memref.load %m0[%53, %94] : memref<9x64xf32>
                  %96 = vector.broadcast %95 : f32 to vector<8xf32>
                  %97 = math.fma %96, %91, %80 : vector<8xf32>
                  %98 = math.fma %96, %93, %81 : vector<8xf32>
                  %99 = arith.addi %53, %c1 : index
                  %100 = arith.addi %17, %79 : index
                  %101 = memref.load %m0[%99, %100] : memref<9x64xf32>
                  %102 = vector.broadcast %101 : f32 to vector<8xf32>
                  %103 = math.fma %102, %91, %82 : vector<8xf32>
                  %104 = math.fma %102, %93, %83 : vector<8xf32>
                  %105 = arith.addi %53, %c11 : index
                  %106 = arith.addi %17, %79 : index
                  %107 = memref.load %m0[%105, %106] : memref<9x64xf32>
                  %108 = vector.broadcast %107 : f32 to vector<8xf32>
                  %109 = math.fma %108, %91, %84 : vector<8xf32>
                  %110 = math.fma %108, %93, %85 : vector<8xf32>
                  %111 = arith.addi %53, %c14 : index
                  %112 = arith.addi %17, %79 : index
                  %113 = memref.load %m0[%111, %112] : memref<9x64xf32>
                  %114 = vector.broadcast %113 : f32 to vector<8xf32>
                  %115 = math.fma %114, %91, %86 : vector<8xf32>
                  %116 = math.fma %114, %93, %87 : vector<8xf32>
                  %117 = arith.addi %53, %c4 : index
                  %118 = arith.addi %17, %79 : index
                  %119 = memref.load %m0[%117, %118] : memref<9x64xf32>
                  %120 = vector.broadcast %119 : f32 to vector<8xf32>
                  %121 = math.fma %120, %91, %88 : vector<8xf32>
                  %122 = math.fma %120, %93, %89 : vector<8xf32>
                  %123 = arith.addi %79, %c1 : index
                  %124 = vector.load %1[%123, %54] : memref<64x16xf32>, vector<8xf32>
                  %125 = arith.addi %54, %c7 : index
                  %126 = vector.load %1[%123, %125] : memref<64x16xf32>, vector<8xf32>
                  %127 = arith.addi %17, %123 : index
                  %128 = memref.load %m0[%53, %127] : memref<9x64xf32>
                  %129 = vector.broadcast %128 : f32 to vector<8xf32>
// 211 lines more
                  %341 = math.fma %339, %324, %308 : vector<8xf32>
                  %342 = arith.addi %53, %c14 : index
                  %343 = arith.addi %17, %321 : index
                  %344 = memref.load %m0[%342, %343] : memref<9x64xf32>
                  %345 = vector.broadcast %344 : f32 to vector<8xf32>
                  %346 = math.fma %345, %322, %313 : vector<8xf32>
                  %347 = math.fma %345, %324, %314 : vector<8xf32>
                  %348 = arith.addi %53, %c4 : index
                  %349 = arith.addi %17, %321 : index
                  %350 = memref.load %m0[%348, %349] : memref<9x64xf32>
                  %351 = vector.broadcast %350 : f32 to vector<8xf32>
                  %352 = math.fma %351, %322, %319 : vector<8xf32>
                  %353 = math.fma %351, %324, %320 : vector<8xf32>
                  scf.yield %328, %329, %334, %335, %340, %341, %346, %347, %352, %353 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }
